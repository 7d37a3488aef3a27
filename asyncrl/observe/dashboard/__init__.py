"""A page that shows runs, from their files alone: live, or as one file to attach to an issue.

The page does not trust the content of a run's files: all of it is shown as text and never parsed as HTML.
"""
