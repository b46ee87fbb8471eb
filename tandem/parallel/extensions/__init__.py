"""Training by data-parallel functions: update rules, and a function that makes a step."""
