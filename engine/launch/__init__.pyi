# The public names and where they are; `lazy_loader` imports each when it is first used.

from .on_ray import RayServers as RayServers
from .processes import ServerProcesses as ServerProcesses
from .server_folder import ServerFolder as ServerFolder
from .spec import ServerSpec as ServerSpec
from .watched import WatchLimits as WatchLimits
