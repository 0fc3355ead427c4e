"""Public benchmarks: what is asked of which model, its predictions, scores, comparisons and files for servers
(`ans eval`)."""
