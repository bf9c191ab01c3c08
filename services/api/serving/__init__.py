"""Prediction: the batcher, the engines, the active student and the follower that sees promotions."""
