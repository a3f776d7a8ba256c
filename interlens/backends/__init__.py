"""Who answers requests: resident torch modules, hosted models, scripts; all fill one `Backend` protocol."""
