"""Peers: providers of models that tests talk to over the wire, on this machine.

`provider.Provider` serves from a thread of the test, `remote.spawned` from a process of its own.
"""
