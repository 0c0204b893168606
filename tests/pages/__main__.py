"""Write what is made from tables: ``python -m tests.pages`` what git has, ``python -m tests.pages FOLDER`` the site.

FOLDER is a copy of the pages, into which ``make docs`` has this write whole tables and the API reference.
"""

import sys
from pathlib import Path

from tests.pages.made import write, write_site

if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_site(Path(sys.argv[1]))
    else:
        write()
