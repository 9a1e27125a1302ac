"""`tensorhub doctor`: do weights that come through the store equal weights from disk?"""
