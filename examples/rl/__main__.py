"""`python -m examples.rl`."""

from __future__ import annotations

import sys

from examples.rl.run import main

sys.exit(main())
