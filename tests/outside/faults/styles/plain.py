"""Faults in plain PyTorch scripts."""

from __future__ import annotations

from outside.faults.case import Pair
from outside.faults.styles.plain_bases import ACCUMULATE, BREAST, FINETUNE, HOUSES, WINE

STUCK = ("loss_not_decreasing", "loss_at_chance")
WILD = (
    "nonfinite",
    "exploding_gradients",
    "loss_spike",
    "loss_not_decreasing",
    "update_ratio",
    "dead_units",
    "outliers",
)
OUTPUT, LOSS, DATA = "output activation", "loss", "data"
RATE, LOOP = "learning rate and optimizer", "training loop"
UNTRAINED, MODE, INIT = "parameters not trained", "mode, dropout, batch norm", "initialisation"

PAIRS = [
    Pair("wine: softmax layer at the end", "SO 43529931", OUTPUT, WINE,
         (("        th.nn.Linear(width, n_out),\n", "        th.nn.Linear(width, n_out),\n        th.nn.Softmax(dim=-1),\n"),),
         "activation_loss_mismatch", "th.nn.Softmax", STUCK, ("5", "4")),
    Pair("wine: raw features", "SO 58844149; DeepFD", DATA, WINE,
         (("    Xtr, Xte = scaler.transform(Xtr), scaler.transform(Xte)\n", ""),), "inputs_not_normalised", "scaler =",
         (*STUCK, *WILD, "learning_rate_high"), (":input",)),
    Pair("wine: rate of 10", "DeepCrime HLR", RATE, WINE, (("default=0.05", "default=10.0"),), "learning_rate_high",
         "th.optim.SGD", WILD),
    Pair("wine: rate of 1e-7", "DeepCrime HLR", RATE, WINE, (("default=0.05", "default=1e-7"),), "learning_rate_low",
         "th.optim.SGD", (*STUCK, "update_ratio")),
    Pair("wine: labels of another order", "DeepCrime TCL", DATA, WINE,
         (("    return Xtr.astype", "    ytr = np.random.default_rng(0).permutation(ytr)\n    return Xtr.astype"),),
         "loss_at_chance", "permutation(ytr)", STUCK, ()),
    Pair("wine: all weights one constant", "DeepCrime WCI", INIT, WINE,
         (("    loss_fn =", "    for w in net.parameters():\n        th.nn.init.constant_(w, 0.1)\n    loss_fn ="),),
         "poor_initialisation", "constant_", (*STUCK, "representation_collapse"), ("0", "2", "4")),
    Pair("houses: target without its column", "SO 65219569", LOSS, HOUSES, (("y = y.reshape(-1, 1)\n", ""),),
         "loss_broadcast", "(pred - yb) ** 2", STUCK),
    Pair("houses: tanh readout of raw targets", "DeepFD", OUTPUT, HOUSES,
         (("y = (y - y.mean()) / y.std()\n", ""), ("return self.readout(self.body(inp))",
                                                  "return torch.tanh(self.readout(self.body(inp)))")),
         "output_bounded", "(pred - yb) ** 2", (*STUCK, "saturated"), ("readout",)),
    Pair("houses: validation leaves dropout off", "TrainCheck; SO 60018578", MODE, HOUSES,
         (("            self.net.train()\n", ""),), "trained_in_eval_mode", "self.net.eval()", STUCK),
    Pair("houses: validation without eval", "SO 53879727", MODE, HOUSES, (("        self.net.eval()\n", ""),),
         "eval_in_train_mode", "self.loss(X[n_train:]", (), ()),
    Pair("houses: optimizer made in each epoch", "TrainCheck", RATE, HOUSES,
         (("            self.net.train()\n", "            self.net.train()\n            self.opt = optim.AdamW("
           "self.net.parameters(), lr=self.cfg.lr)\n"),), "optimizer_recreated", "            self.opt = optim.AdamW"),
    Pair("breast: logits into BCEWithLogits after sigmoid", "SO 54592879", OUTPUT, BREAST,
         (("crit = nn.BCELoss()", "crit = nn.BCEWithLogitsLoss()"),), "activation_loss_mismatch", "crit(out",
         STUCK, ("l3",)),
    Pair("breast: a layer left out of the groups", "TrainCheck", UNTRAINED, BREAST,
         ((" {\"params\": net.l3.parameters()}]", "]"),), "optimizer_incomplete", "optimiser = torch.optim", (), ("l3",)),
    Pair("breast: squared error of a detached output", "SO 59867119", UNTRAINED, BREAST,
         (("h = F.relu(self.l2(h))", "h = F.relu(self.l2(h)).data"),), "graph_detached", ".data", (), ("l1", "l2", "bn")),
    Pair("breast: one sample in a batch", "SO 65882526", MODE, BREAST,
         (("batch_size=32", "batch_size=1"), ("F.relu(self.bn(self.l1(batch[\"features\"])))",
           "F.relu(self.bn(self.l1(batch[\"features\"]).unsqueeze(-1).expand(-1, -1, 2)).mean(-1))"),
          ("[469, 100]", "[120, 449]")), "batchnorm_cannot_estimate", "batch_size=1,", STUCK, ("bn",)),
    Pair("breast: huge first weights", "DeepCrime WCI", INIT, BREAST,
         (("        self.bn = nn.BatchNorm1d(32)\n", "        self.bn = nn.BatchNorm1d(32)\n"
           "        nn.init.normal_(self.l2.weight, 0, 30.0)\n"),), "poor_initialisation", "nn.init.normal_",
         (*WILD, "saturated"), ("l2",)),
    Pair("accumulate: gradients cleared for each micro-batch", "TrainCheck", LOOP, ACCUMULATE,
         (("        loss.backward()\n", "        optimizer.zero_grad()\n        loss.backward()\n"),),
         "gradients_reset_early", "        optimizer.zero_grad()"),
    Pair("accumulate: never cleared", "TrainCheck; SO 48001598", LOOP, ACCUMULATE,
         (("    optimizer.zero_grad()\n", ""),), "gradients_not_reset", "loss.backward()", WILD),
    Pair("accumulate: clipped to nothing", "DeepCrime OCG", RATE, ACCUMULATE, (("max_norm = 20, 4, 5.0",
         "max_norm = 20, 4, 1e-6"),), "clipping_too_hard", "clip_grad_norm_", (*STUCK, "learning_rate_low")),
    Pair("accumulate: the schedule is forgotten", "SO 59017023", RATE, ACCUMULATE, (("    scheduler.step()\n", ""),),
         "scheduler_never_stepped", "LambdaLR"),
    Pair("breast: the same order in each epoch", "TrainCheck", DATA, BREAST,
         (("    net.train()\n", "    net.train()\n    torch.manual_seed(1)\n"),), "order_repeated", "train_dl ="),
    Pair("houses: validation without eval and no_grad", "SO 53879727", MODE, HOUSES,
         (("        self.net.eval()\n", ""), ("    @torch.no_grad()\n", "")), "eval_in_train_mode", "pred = self.net(xb)"),
    Pair("accumulate: cosine over micro-batches of one cycle", "SO 59017023", RATE, ACCUMULATE,
         (("    scheduler.step()\n", ""), ("        loss.backward()\n", "        loss.backward()\n        scheduler.step()\n"),
          ("step / total", "min(step, total) / total")), "scheduler_per_batch", "        scheduler.step()",
         ("learning_rate_zero", *STUCK, "learning_rate_low")),
    Pair("finetune: the new head frozen too", "SO 51748138", UNTRAINED, FINETUNE,
         (("for p in tuned.encoder.parameters():", "for p in tuned.parameters():"),
          ("fit(tuned, tuned.fc.parameters(), x2", "fit(tuned, [torch.zeros(1, requires_grad=True)], x2"),
          ("loss = nn.functional.cross_entropy(model(x[j]), t[j])",
           "loss = nn.functional.cross_entropy(model(x[j]), t[j]) + 0 * opt.param_groups[0]['params'][0].sum()")),
         "frozen", "requires_grad = False", ("optimizer_stale", "unchanged", *STUCK), ("fc",)),
    Pair("finetune: optimizer of the old head", "TrainCheck", UNTRAINED, FINETUNE,
         (("fit(tuned, tuned.fc.parameters(), x2", "fit(tuned, pre.fc.parameters(), x2"),), "optimizer_stale",
         "fit(tuned, pre.fc", ("optimizer_incomplete", "gradients_reset_early", "unchanged", *STUCK), ("fc", "1.fc")),
]  # fmt: skip
