"""`requests.payloads`, by the name under which engines of other packages import it."""

from teola_plugin.requests.payloads import *  # noqa: F403
