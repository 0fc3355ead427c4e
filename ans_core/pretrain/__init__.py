"""What only a model from random weights needs: its sizes and weights, and the objectives that stand in for what published weights know."""
