"""What heads do over a whole corpus: statistics, gathered while the model runs."""
