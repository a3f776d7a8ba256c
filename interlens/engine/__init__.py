"""The decode loop over a resident torch module: token ids in, token ids out. It knows nothing about chat."""
