"""Captures and edits as per-row data: sites, plans, and the one place that registers torch hooks."""
