"""Converting a run into another.

`pooling` merges key/value heads of a trained model and starts a new run from the result. The rooms
before this one do not know about it.
"""
