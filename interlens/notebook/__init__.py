"""Pictures and live views; the only layer that knows where it is shown."""
