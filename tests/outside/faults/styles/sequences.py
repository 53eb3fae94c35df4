"""Faults in scripts on sequences."""

from __future__ import annotations

from outside.faults.case import Pair
from outside.faults.styles.plain import INIT, LOSS, MODE, OUTPUT, RATE, STUCK, UNTRAINED, WILD
from outside.faults.styles.sequence_bases import ATTENTION, ENCODER, FORECAST, HUGGING

SEQUENCES = "attention and sequences"
MASK = '        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))\n'

PAIRS = [
    Pair("characters: the future is not masked", "TrainCheck; SO 64799622", SEQUENCES, ATTENTION, ((MASK, ""),),
         "attention_not_causal", "wei = F.softmax", (), ("heads.0", "heads.1")),
    Pair("characters: targets not shifted", "TrainCheck", SEQUENCES, ATTENTION, (("data[i + 1:i + block_size + 1]",
         "data[i:i + block_size]"),), "targets_not_shifted", "F.cross_entropy"),
    Pair("characters: softmax over the queries", "SO 49036993", SEQUENCES, ATTENTION,
         (("wei = F.softmax(wei, dim=-1)", "wei = F.softmax(wei.masked_fill(torch.isinf(wei), -1e9), dim=0)"),),
         "softmax_axis", "wei = F.softmax", STUCK, ("heads.0", "heads.1")),
    Pair("characters: layers in a plain list", "SO 58097924", UNTRAINED, ATTENTION,
         (("nn.ModuleList([Head(), Head()])", "[Head(), Head()]"),), "parameters_unregistered", "optimizer = torch",
         (), ()),
    Pair("characters: embeddings of size 100", "DeepCrime WCI", INIT, ATTENTION,
         (("        self.lm_head =", "        nn.init.normal_(self.token_embedding.weight, std=100.0)\n        self.lm_head ="),),
         "poor_initialisation", "nn.init.normal_", (*WILD, "attention_collapse", "outliers"), ("token_embedding",)),
    Pair("encoder: padding is attended to", "SO 62629644", SEQUENCES, ENCODER,
         ((", src_key_padding_mask=~keep", ""),), "padding_attended", "h = self.enc(", (), ("enc",)),
    Pair("encoder: batch and time exchanged", "SO 66625945", SEQUENCES, ENCODER,
         (("dropout=0.0, batch_first=True", "dropout=0.0, batch_first=False"), (", src_key_padding_mask=~keep", "")),
         "batch_axis_mixed", "nn.TransformerEncoderLayer", STUCK, ("enc",)),
    Pair("forecast: batch and time exchanged", "SO 49466894", SEQUENCES, FORECAST, ((", batch_first=True", ""),),
         "batch_axis_mixed", "self.rnn = nn.LSTM", STUCK, ("rnn",)),
    Pair("forecast: relu on the output", "DeepFD; SO 48251943", OUTPUT, FORECAST,
         (("return self.head(out[:, -1])", "return torch.relu(self.head(out[:, -1]))"),), "output_bounded",
         "criterion(model", (*STUCK, "dead_units"), ("head",)),
    Pair("forecast: targets lose their axis", "SO 65219569", LOSS, FORECAST, (("windows[:, -1:].copy()", "windows[:, -1].copy()"),),
         "loss_broadcast", "criterion(model", STUCK),
    Pair("hugging: a rate of 5", "DeepCrime HLR", RATE, HUGGING, (("learning_rate=5e-3", "learning_rate=5.0"),),
         "learning_rate_high", "trainer.train()", WILD, ()),
    Pair("hugging: dropout of 0.95", "DeepCrime DCR; UMLAUT", MODE, HUGGING,
         (("hidden_dropout_prob=0.05", "hidden_dropout_prob=0.95"),), "dropout_high", "hidden_dropout_prob",
         STUCK, ("bert.embeddings.dropout",)),
    Pair("hugging: all but the embeddings frozen", "SO 51748138", UNTRAINED, HUGGING,
         (("args = Training", "for n, p in model.named_parameters():\n    p.requires_grad = 'embeddings' in n\nargs = Training"),),
         "frozen", "p.requires_grad", STUCK, ("classifier",)),
]  # fmt: skip
