// What the report draws with, and nothing else of ECharts; README.md says how it is bundled.
import { use } from "echarts/core";
import { CustomChart, LineChart, ScatterChart } from "echarts/charts";
import {
  DataZoomInsideComponent,
  DataZoomSliderComponent,
  GridComponent,
  TooltipComponent,
} from "echarts/components";
import { LabelLayout } from "echarts/features";
import { SVGRenderer } from "echarts/renderers";

use([CustomChart, LineChart, ScatterChart, GridComponent, TooltipComponent]);
use([DataZoomInsideComponent, DataZoomSliderComponent, LabelLayout, SVGRenderer]);

export { getInstanceByDom, init, version } from "echarts/core";
