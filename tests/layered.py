"""A causal language model around layers of any kind: an embedding, two of them in a row, a head."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class LayeredForCausalLM(PreTrainedModel):
    """Subclasses say their `config_class` and the `layer_class` that is built from a config."""

    layer_class: type[nn.Module]

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, **kwargs):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.head(hidden_states)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
