"""Streaming decoders on the slot pool: a codec's transformer, flow matching, a conformer.

Each module has three parts: the model, whose attention is a callable that it is given (`Attend`);
`Pooled...`, which serves many streams of it through a `BoundedKVManager`; and `Explicit...`, one
stream of the same model over caches that grow. `traffic` runs the two side by side. Read `mimi`
first. How to do this with a model of your own: `docs/streaming-decoders.md`.
"""
