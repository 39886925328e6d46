"""One tree: everything a run needs to go on, gathered for `save` and handed back by `load`.

Tensors travel as boxes of global tensors: ``parameters.NAME`` (masters, fp32 where the model is 16-bit),
``buffers.NAME`` and ``optimizer.NAME.KEY``. Everything else is JSON, from `Stateful` parts.
"""

from __future__ import annotations
