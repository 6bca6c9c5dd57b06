"""Each row of the lists of other systems' faults, and the test that shows that ours is right."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.single

NXD = {
    1: ("bfloat16 gradients of inputs are not summed", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    2: ("max_grad_norm is ignored with ZeRO-1", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    3: ("a resume with ZeRO-1 loses the weights", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    4: ("generators crash clipping", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
    5: ('norm_type "inf" crashes', "parallel_layers", "test_groups_saving_and_what_is_refused"),
    6: ("label smoothing is wrong", "parallel_layers", "test_cross_entropy"),
    7: ("ignored targets count, logits are overwritten", "parallel_layers", "test_cross_entropy"),
    8: ("grouped heads cannot have biases", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    9: ("the norm of fused heads", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
    10: ("frozen fused heads crash", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    11: ("LoraConfig has no enable_lora", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    12: ("sharded adapters cannot be reloaded", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    13: ("lora_only trains no bias", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    14: (
        "adapters drift with sequence parallelism",
        "nxd_training",
        "test_adapters_train_and_are_saved_in_three_modes",
    ),
    15: ("the first argument of the model is lost", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    16: ("async_save is frozen, and sees later weights", "nxd_bugs", "test_every_save_is_of_its_own_time_and_kind"),
    17: ("num_kept_ckpts=0 deletes what was saved", "nxd_bugs", "test_every_save_is_of_its_own_time_and_kind"),
    18: ("ZeRO-1 at other data degrees", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    19: ("pad_model changes the function", "nxd_layers", "test_padded_heads_change_nothing"),
    20: ("xm.optimizer_step divides by all", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
}

OPTIMUM = {
    1: ("a class by hand for every model", "optimum_neuron", "test_architectures_that_no_document_names"),
    2: ("the process is patched", "optimum_bugs", "test_nothing_of_the_process_is_changed"),
    3: ("the config is changed", "optimum_neuron", "test_it_trains_as_the_unsplit_model"),
    4: ("fake names among the weights", "optimum_neuron", "test_lazy_loading_of_one_rank_and_its_sizes"),
    5: ("the table says True, the code raises", "optimum_neuron", "test_support_is_what_the_checks_say"),
    6: ("parameters are ignored", "optimum_neuron", "test_the_small_print"),
    7: ("sizes must divide", "optimum_neuron", "test_it_trains_as_the_unsplit_model"),
    8: ("checkpoints of one layout", "optimum_neuron", "test_the_small_print"),
    9: ("tiled keys permute queries", "optimum_neuron", "test_it_trains_as_the_unsplit_model"),
    10: ("pipelines give the loss alone", "optimum_neuron", "test_stages_train_as_the_unsplit_model"),
    11: ("no way back, no full state", "optimum_bugs", "test_full_tensors_and_the_whole_model_come_back"),
    12: ("ignored labels count", "optimum_bugs", "test_ignored_labels_count_nothing_and_logits_stay"),
    14: ("norms of heads drift", "optimum_neuron", "test_it_trains_as_the_unsplit_model"),
    15: ("adapters drift with sequence parallelism", "optimum_neuron", "test_the_small_print"),
    17: ("several files and few keys", "optimum_neuron", "test_the_small_print"),
}

AUTOMODEL = {
    "1.3 missing": (
        "a class that is not there wraps nothing",
        "nemo_automodel",
        "test_classes_are_imported_or_all_their_errors_told",
    ),
    "1.4 units": ("no units, the default, is a TypeError", "nemo_automodel", "test_nvfsdp"),
    "1.4 strategies": ("the document's strategies were never accepted", "nemo_automodel", "test_nvfsdp"),
    "1.4 average": ("average_in_collective raises", "nemo_automodel", "test_nvfsdp"),
    "1.4 per token": ("sums instead of means", "nemo_automodel", "test_nvfsdp"),
    "1.4 meta": (
        "the meta flag is passed by two names",
        "nemo_automodel",
        "test_a_model_on_the_meta_device_starts_as_its_modules_do",
    ),
    "1.4 nan": ("the check for NaN does nothing", "nemo_automodel", "test_policies_values_and_the_end"),
    "1.4 idle": ("what does nothing says nothing", "nemo_automodel", "test_what_changes_nothing_is_said_once"),
    "1.6 shared": (
        "callers share one mutable style",
        "nemo_automodel",
        "test_every_style_string_has_a_style_of_its_own",
    ),
    "1.6 strings": (
        "strings of transformers raise",
        "nemo_automodel",
        "test_every_style_string_has_a_style_of_its_own",
    ),
    "1.6 others": ("no string is a TypeError", "nemo_automodel", "test_a_style_that_is_none_is_a_value_error"),
    "1.7 local": ("a DTensor on the CPU gives its local tensor", "nemo_automodel", "test_policies_values_and_the_end"),
    "4.3 norms": ("gradients of norms within heads are parts", "nemo_automodel", "test_fsdp2_on_two_ranks"),
    "4.3 fused": ("fused gate and up are cut in one", "nemo_automodel", "test_fsdp2_on_two_ranks"),
    "4.3 across": ("norms across heads raise", "nemo_automodel", "test_fsdp2_on_two_ranks"),
    "4.3 no plan": ("models without a plan raise", "nemo_automodel", "test_fsdp2_on_two_ranks"),
    "4.3 replicas": ("the norm counts replicas once each", "nemo_automodel", "test_fsdp2_on_two_ranks"),
}


@pytest.mark.parametrize(
    ("what", "module", "test"),
    [row for rows in (NXD, OPTIMUM, AUTOMODEL) for row in rows.values()],
    ids=[
        f"{name} {row}"
        for name, rows in {"nxd": NXD, "optimum": OPTIMUM, "automodel": AUTOMODEL}.items()
        for row in rows
    ],
)
def test_every_row_has_its_test(what, module, test):
    assert callable(getattr(importlib.import_module(f"tests.compat.test_{module}"), test)), what
