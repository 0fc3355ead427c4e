"""Only for models from random weights: sizes and weights, and objectives that replace what published weights
have learned."""
