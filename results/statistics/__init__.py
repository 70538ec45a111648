"""Statistics of measurements and predictions: noise, ranking, agreement and prediction errors."""
