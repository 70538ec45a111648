"""Faults of routed experts: which copy goes where, whose gradients are summed, and what balances the load."""

from __future__ import annotations

from tests.planted.faults import ENGINE, OPTIMIZER, faults_of
from tests.workloads.engine.parity import experts

_DISPATCH = ENGINE + "collectives.dispatch:Dispatch."
_ROUTER = ENGINE + "layers.routing:Router."
_MOE = experts()
_AUX = experts(gate="sigmoid", balance="aux_loss", balance_coefficient=0.5)
_BIAS = experts(gate="sigmoid", balance="bias", balance_coefficient=0.05)
_RECOMPUTE = ENGINE + "layers.experts:Experts._recompute"
_ONE = {"moe": _MOE, "micro_batch_size": 4}
_EP = {"moe": _MOE, "dp": 2, "ep": 2, "micro_batch_size": 2}
_SEQUENCES = {"moe": _AUX, "routing": "learned", "micro_batch_size": 3, "global_batch_size": 6}
_CAPACITY = {"moe": _MOE, "routing": "learned", "capacity_factor": 1.1, "micro_batch_size": 2}
_UNEVEN = {**_EP, "routing": "learned"}
_REPLICAS = {"moe": _MOE, "dp": 4, "ep": 2, "micro_batch_size": 2}
EXPERTS = [
    *faults_of(
        "ep",
        (
            "experts_in_order_of_arrival",
            "received rows stay in the order of their senders",
            _DISPATCH + "arrive",
            "reorder_rows(rows, self.by_expert_M, self.by_arrival_M)",
            "rows",
            _EP,
        ),
        (
            "weights_in_order_of_arrival",
            "weights of copies stay in the order of their senders",
            _DISPATCH + "arrive_weights",
            "_gather_values(weights, self.by_expert_M, self.by_arrival_M)",
            "weights",
            _UNEVEN,
        ),
        (
            "order_applied_twice",
            "outputs go home in the order of experts once more",
            _DISPATCH + "bring_back",
            "reorder_rows(rows_MD, self.by_arrival_M, self.by_expert_M)",
            "reorder_rows(rows_MD, self.by_expert_M, self.by_arrival_M)",
            _EP,
        ),
        (
            "alike_on_every_rank",
            "every expert-parallel rank has the first one's experts",
            ENGINE + "collectives.parameters:initial_part",
            "count * ep.rank if ep is not None else 0",
            "0",
            _EP,
        ),
        (
            "experts_in_the_data_mesh",
            "experts of different ranks are summed as if they were one",
            ENGINE + "collectives.groups:_expert_groups",
            'mesh["replicate", "shard"], {"ep"',
            'init_device_mesh(device.type, (e.dp * e.cp, 1), mesh_dim_names=("replicate", "shard")), {"ep"',
            _EP,
        ),
        (
            "norm_counts_experts_copies",
            "the norm counts every copy of an expert",
            OPTIMIZER + "ShardedOptimizer._share",
            "if not placement.is_expert:",
            "copies = 1 if placement.is_expert else copies\n    if not placement.is_expert:",
            _REPLICAS,
        ),
        (
            "experts_not_summed_over_replicas",
            "gradients of experts are not summed over the ranks that hold the same ones",
            ENGINE + "training.data_parallel:apply_data_parallel",
            "_without_single_replica(groups.expert_mesh)",
            'groups.expert_mesh["shard"]',
            _REPLICAS,
        ),
        scale=2.0,
    ),
    *faults_of(
        "experts",
        (
            "weights_not_normalized",
            "the weights of a token's experts do not add up to 1",
            _ROUTER + "forward",
            "weights_Tk / weights_Tk.sum(-1, keepdim=True)",
            "weights_Tk",
            _ONE,
        ),
        (
            "shared_experts_twice",
            "shared experts count twice",
            ENGINE + "layers.experts:RoutedFeedForward.forward",
            "out + shared_out",
            "out + 2 * shared_out",
            _ONE,
        ),
        (
            "chosen_without_weight",
            "every copy has the same weight",
            _DISPATCH + "arrive_weights",
            "weights_Tk.flatten()",
            "(weights_Tk * 0 + weights_Tk.mean()).flatten()",
            _ONE,
        ),
        (
            "gate_and_up_swapped",
            "the gate is taken for the up projection",
            ENGINE + "layers.experts:Experts.forward",
            "weighted_activation(gate_up, weights_M, self.expert)",
            "weighted_activation(torch.cat(gate_up.chunk(2, 1)[::-1], 1), weights_M, self.expert)",
            _ONE,
        ),
        (
            "partial_outputs_not_summed",
            "the parts of experts that tensor-parallel ranks hold are not summed",
            ENGINE + "layers.experts:RoutedFeedForward.both",
            "sum_partials(out, self.parallel.tp)",
            "out.chunk(self.parallel.tp.size)[self.parallel.tp.rank]",
            {"moe": _MOE, "tp": 2, "etp": 2, "micro_batch_size": 4},
        ),
        (
            "shared_experts_lost_with_tp",
            "shared experts count for nothing with tensor parallelism",
            ENGINE + "layers.experts:RoutedFeedForward.forward",
            "out + shared_out",
            "out + shared_out * (self.parallel.tp.size == 1)",
            {"moe": _MOE, "tp": 2, "micro_batch_size": 4},
        ),
        (
            "router_summed_again",
            "the gradient of the router is summed over ranks that have the whole of it",
            "workloads.spec.weights:experts",
            "(count, model.hidden_size), INIT_STD, WHOLE)",
            "(count, model.hidden_size), INIT_STD, WHOLE_BY_HEADS)",
            {"moe": _MOE, "tp": 2, "etp": 2, "sequence_parallel": False, "micro_batch_size": 4},
        ),
        (
            "rows_again_of_neighbour",
            "what experts make again is that of the row before",
            _RECOMPUTE,
            "grouped_product(x_MD,",
            "grouped_product(x_MD.roll(1, 0),",
            {**_ONE, "recompute": "experts"},
        ),
        (
            "product_again_without_weights",
            "the product that experts make again has no weights",
            _RECOMPUTE,
            "weighted_activation(gate_up, weights_M, self.expert)",
            "weighted_activation(gate_up, torch.ones_like(weights_M), self.expert)",
            {**_EP, "recompute": "selective+experts"},
        ),
    ),
    *faults_of(
        "balance",
        (
            "term_of_own_tokens",
            "the balance term takes the load of a rank's own tokens",
            _ROUTER + "_with_balance_term",
            "wait(all_reduce_async(counts_BE, axis))",
            "counts_BE * axis.size",
            {"moe": _AUX, "cp": 2, "routing": "learned", "micro_batch_size": 2},
        ),
        (
            "sequences_of_the_first_rank",
            "the balance term takes every rank's tokens for the first sequences",
            _ROUTER + "_sequences",
            'self.routing.groups.position["tp"] * tokens if e.sequence_parallel else 0',
            "0",
            {**_SEQUENCES, "tp": 2},
        ),
        (
            "sequences_uncut",
            "the balance term counts in whole sequences where a rank has a part of each",
            _ROUTER + "_sequences",
            "(e.seq_len // e.cp)",
            "e.seq_len",
            {**_SEQUENCES, "cp": 2},
        ),
        (
            "one_load_for_all_sequences",
            "the balance term takes the mean load of the micro-batch's sequences",
            _ROUTER + "_with_balance_term",
            "counts_BE.view(-1, moe.num_experts)[sequence_T]",
            "counts_BE.view(-1, moe.num_experts).mean(0).expand(len(sequence_T), -1)",
            {**_SEQUENCES, "tp": 2, "etp": 2, "sequence_parallel": False},
        ),
        (
            "term_scaled_by_ranks",
            "the balance term counts once for every data-parallel rank",
            _ROUTER + "_with_balance_term",
            "(factor / (e.seq_len * e.global_batch_size))",
            "(factor * e.dp / (e.seq_len * e.global_batch_size))",
            {"moe": _AUX, "dp": 2, "routing": "learned", "micro_batch_size": 2},
        ),
        steps=2,
    ),
    *faults_of(
        "balance",
        (
            "bias_of_own_loads",
            "the bias follows the load of a rank's own tokens",
            ENGINE + "training.balance:finish_routing",
            "_over_stage(step, groups).double()",
            "step.double()",
            {"moe": _BIAS, "dp": 2, "routing": "learned", "micro_batch_size": 2},
        ),
        (
            "bias_with_the_load",
            "the bias grows with the load",
            ENGINE + "training.balance:finish_routing",
            "(loads.mean(1, keepdim=True) - loads)",
            "(loads - loads.mean(1, keepdim=True))",
            {"moe": _BIAS, "routing": "learned", "micro_batch_size": 4},
        ),
        (
            "bias_in_the_weights",
            "the bias weighs experts, too",
            _ROUTER + "forward",
            "weights_Tk = scores_TE.gather(1, choice_Tk)",
            "weights_Tk = (scores_TE + self.bias).gather(1, choice_Tk)",
            {"moe": _BIAS, "routing": "learned", "micro_batch_size": 4},
        ),
        steps=2,
    ),
    *faults_of(
        "balance",
        (
            "bias_forgets",
            "the bias is the last move alone, not the sum of all moves",
            ENGINE + "training.balance:finish_routing",
            "router.bias += move.to(router.bias.dtype)",
            "router.bias.copy_(move)",
            {"moe": _BIAS, "dp": 2, "routing": "learned", "micro_batch_size": 2},
        ),
        (
            "loads_of_all_steps",
            "the bias follows the loads of all steps, not of the last one",
            ENGINE + "training.balance:finish_routing",
            "router.load.zero_()",
            "pass",
            {"moe": _BIAS, "dp": 2, "routing": "learned", "micro_batch_size": 2},
        ),
        steps=4,
    ),
    *faults_of(
        "experts",
        (
            "capacity_rounded_down",
            "an expert's capacity is rounded down",
            ENGINE + "collectives.dispatch:capacity_of",
            "math.ceil",
            "math.floor",
            _CAPACITY,
        ),
        (
            "one_copy_too_few",
            "the last copy that an expert can take is dropped",
            ENGINE + "collectives.dispatch:_cut",
            "rank < capacity",
            "rank + 1 < capacity",
            {**_CAPACITY, "tp": 2, "etp": 1},
        ),
    ),
    *faults_of(
        "loads",
        (
            "copies_counted_again",
            "the loads count copies again when a backward routes them again",
            _ROUTER + "note",
            "if is_recomputing():",
            "if False:",
            {"moe": _MOE, "routing": "learned", "recompute": "full", "micro_batch_size": 4},
        ),
        (
            "balance_term_counted_again",
            "the balance term is recorded again when a backward routes again",
            _ROUTER + "_with_balance_term",
            "if not is_recomputing():",
            "if True:",
            {"moe": _AUX, "routing": "learned", "recompute": "full", "micro_batch_size": 4},
        ),
        check="loads",
    ),
]
