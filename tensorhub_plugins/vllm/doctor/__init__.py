"""`tensorhub doctor`: checks that weights which come through the store equal weights from disk."""
