"""Counting what really happens in a run: collectives with their bytes and axis, and live memory. The dry run counts alike."""
from support.dryrun import Watch

Collectives = LiveMemory = Watch
