import "uplot/dist/uPlot.min.css";
import "./theme.css";
import { startControl } from "./control.ts";
import { Embedded } from "./embedded.ts";
import { Shell } from "./shell.ts";
import { Http } from "./source.ts";

void new Shell(document.getElementById("app")!, Embedded.here() ?? new Http()).start();
startControl();
