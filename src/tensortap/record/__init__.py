"""One step: rows are recorded, and when it closes they are written, held for look-back, or dropped.

`recorder` is what adapters call; `table` holds a step's rows; `arming`, `elements`, `decision` and `lookback` are the
recorder's jobs; `writer` hands closed steps to sinks; `counters`, `cost` and `budget` keep count.

May import `types`, `errors`, `text`, `markup`, `select`, `reduce` and `distributed`; never an adapter, the store, a
sink or `watch`.
"""
