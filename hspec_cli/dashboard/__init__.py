"""The dashboard: a stream of timed events, folded to a state, drawn as lines of a given width and height.

stream.py   events of a run as records, and as JSON lines
state.py    state = fold(state, seconds, record)
view.py     lines = render(state, width, height, now)
parts.py    the sections of a view
live.py     a view on a terminal, redrawn from a thread
feed.py     where a run's events go: a recording, a live view
"""
