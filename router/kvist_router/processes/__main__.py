"""`python -m kvist_router.processes ROLE CONTROL LISTENER [MIND]`: a child of the keeper; see child.py."""

from __future__ import annotations

import sys

from kvist_router.processes.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
