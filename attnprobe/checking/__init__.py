"""The checks of attention calls, and the report of what came of them."""
