"""Faults of modules of multi-token prediction: weights of losses, shifts, norms, and the copies of the embedding."""

from __future__ import annotations

from tests.planted.faults import ENGINE, TWO, faults_of
from tests.planted.plant import Fault

_HEAD, _CHUNK = ENGINE + "layers.transformer:Head.", ENGINE + "layers.transformer:Chunk."
_BLOCK, _DATA = ENGINE + "layers.ahead:AheadBlock.forward", ENGINE + "training.data:"
_ONE, _SEVERAL = {"modules": 1, **TWO}, {"modules": 2, **TWO}
_CUT = {"modules": 1, "pp": 2, "pp_schedule": "1f1b"}

MODULES: list[Fault] = faults_of(
    "modules",
    (
        "ahead_loss_not_weighted",
        "the loss of the modules counts as much as the model's",
        _HEAD + "__init__",
        "self.scale * model.mtp_loss_weight / modules",
        "self.scale / modules",
        _ONE,
    ),
    (
        "ahead_losses_summed",
        "the losses of two modules are added, not averaged",
        _HEAD + "__init__",
        "self.scale * model.mtp_loss_weight / modules",
        "self.scale * model.mtp_loss_weight",
        _SEVERAL,
    ),
    (
        "ahead_loss_in_the_models",
        "the reported loss has that of the modules",
        _HEAD + "forward",
        "self.losses = [of_model,",
        "self.losses = [total.detach(),",
        _ONE,
    ),
    (
        "ahead_targets_not_moved",
        "a module predicts the token that it is given",
        _DATA + "_later_targets",
        "moved[:, :-1] = before[:, 1:]",
        "moved[:, :-1] = before[:, :-1]",
        _ONE,
    ),
    (
        "ahead_targets_moved_from_start",
        "the second module predicts what the first does",
        _DATA + "_later_targets",
        "before = later[-1] if later else targets",
        "before = targets",
        _SEVERAL,
    ),
    (
        "ahead_last_token_counted",
        "the last token predicts token 0",
        _DATA + "_later_targets",
        "torch.full_like(before, NO_TARGET)",
        "torch.zeros_like(before)",
        _ONE,
    ),
    (
        "ahead_moved_after_division",
        "a rank moves the targets that it holds",
        _DATA + "step_batches",
        "part.gather(1, held[cp_rank]) for part in _later_targets(parts[1], experiment.model.mtp_modules, places)",
        "part for part in _later_targets(own[1], experiment.model.mtp_modules, None)",
        {"modules": 1, "cp": 2, "cp_kind": "ring", "micro_batch_size": 4},
    ),
    (
        "ahead_no_target_has_gradient",
        "a token without a target moves the logits",
        ENGINE + "ops.chunked_logits:leave_out",
        "lse.masked_fill_(none, torch.inf)",
        "lse",
        _ONE,
    ),
    (
        "ahead_embeds_the_token_itself",
        "a module gets the token's own embedding",
        _CHUNK + "forward",
        "x, *later = self._embedded([x, *inputs])",
        "x, *later = self._embedded([x, *[x] * len(inputs)])",
        _ONE,
    ),
    (
        "ahead_hidden_norm_left_out",
        "the hidden state is not normed",
        _BLOCK,
        "self.hidden_norm(x_TD)",
        "x_TD + 0 * self.hidden_norm(x_TD)",
        _ONE,
    ),
    (
        "ahead_embedding_norm_left_out",
        "the embedding is not normed",
        _BLOCK,
        "self.embedding_norm(later_TD)",
        "later_TD + 0 * self.embedding_norm(later_TD)",
        _ONE,
    ),
    (
        "ahead_final_norm_left_out",
        "the head reads what no norm has scaled",
        _BLOCK,
        "return x_TD, self.norm(x_TD)",
        "return x_TD, x_TD + 0 * self.norm(x_TD)",
        _ONE,
    ),
    (
        "ahead_inputs_change_places",
        "the projection gets embedding and hidden state in the other order",
        _BLOCK,
        "[self.hidden_norm(x_TD), self.embedding_norm(later_TD)]",
        "[self.embedding_norm(later_TD), self.hidden_norm(x_TD)]",
        _ONE,
    ),
    (
        "ahead_all_from_the_last_layer",
        "every module goes on from the last layer",
        _CHUNK + "forward",
        "hidden, of_head = block(hidden,",
        "_, of_head = block(hidden,",
        _SEVERAL,
    ),
    (
        "ahead_parts_of_other_ranks",
        "with sequence parallelism a rank gets the first tokens of all lists",
        _CHUNK + "_embedded",
        "tokens_KPT.transpose(0, 1).reshape(-1)",
        "tokens_KPT.reshape(-1)",
        {"modules": 1, "tp": 2, "micro_batch_size": 4},
    ),
    (
        "ahead_copy_not_summed",
        "the copies of the embedding keep gradients of their own",
        ENGINE + "collectives.groups:make_groups",
        "(experiment.model.tie_embeddings or experiment.model.mtp_modules) and first != last",
        "experiment.model.tie_embeddings and first != last",
        _CUT,
    ),
    (
        "ahead_copy_counted_twice",
        "the gradient norm has both copies of the embedding",
        ENGINE + "training.optimizer:ShardedOptimizer._share",
        "e.model.tie_embeddings or e.model.mtp_modules > 0",
        "e.model.tie_embeddings",
        _CUT,
    ),
)
