"""Rules: for each Op, how its parts are computed; one module for each kind of Op."""
