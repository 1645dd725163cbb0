"""observers."""
