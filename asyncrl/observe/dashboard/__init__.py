"""A page that shows runs, from their files alone: live, or as one file to attach to an issue.

Everything that a run's files hold is hostile text to the page: it is shown as text and never parsed as HTML.
"""
