"""An in-memory Kubernetes API server, for development and for tests that need faults.

```python
async with DevCluster(Config()) as cluster:
    cluster.write_kubeconfig("kubeconfig")
```
"""

from torpor_devcluster.authn import User
from torpor_devcluster.cluster import DevCluster
from torpor_devcluster.config import Config
from torpor_devcluster.faults import Faults
from torpor_devcluster.requestlog import RequestRecord

__all__ = ["Config", "DevCluster", "Faults", "RequestRecord", "User"]
