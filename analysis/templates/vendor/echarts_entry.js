/* Apache ECharts, cut to what "Every run" draws with: points, lines, boxes and lassos, zoom, on a canvas. */
import { init, use } from "echarts/core";
import { LineChart, ScatterChart } from "echarts/charts";
import { BrushComponent, DataZoomInsideComponent, GridComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([LineChart, ScatterChart, GridComponent, BrushComponent, DataZoomInsideComponent, CanvasRenderer]);

window.echarts = { init };
