import sys; sys.path.insert(0,'/work/main')
import torch, shardwise
from shardwise.testing.spawn import spawn
from shardwise.layers.context import SplitContext
from tests.families import *
from tests.train.test_dropout import FAMILIES, digest
def go(layout):
    with shardwise.Mesh.open(layout) as mesh:
        log=[]
        o, s = SplitContext.draw_own, SplitContext.draw_shared
        def own(self, m):
            log.append(("own", type(m).__name__, self._shared_state is not None, digest(torch.get_rng_state())[:5])); o(self,m)
        def shared(self):
            log.append(("shared", self._shared_state is not None, digest(torch.get_rng_state())[:5])); s(self); log.append(digest(torch.get_rng_state())[:5])
        SplitContext.draw_own, SplitContext.draw_shared = own, shared
        model = tiny_model("llama", **FAMILIES["llama"])
        batch = tiny_batch(model)
        shardwise.parallelize(model, mesh, sequence_parallel=True).train()
        model.activation_checkpointing_enable()
        torch.manual_seed(9)
        loss=model(**batch).loss
        log.append("BACKWARD")
        loss.backward()
        return log
if __name__=="__main__":
    import dbg2
    for x in spawn(dbg2.go,2,"tp2")[0]: print(x)
