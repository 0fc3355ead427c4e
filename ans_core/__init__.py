"""ANS: everything that computes. Imports no Prefect, MLflow or DVC."""
