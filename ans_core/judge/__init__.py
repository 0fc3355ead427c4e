"""A judge of captions: questions written once from the true caption are asked of every sampled one -> rewards
in [0, 1]."""
