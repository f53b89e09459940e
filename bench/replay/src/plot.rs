//! Draws a sweep as SVG: time to first token against the pace, one line a policy, median and slowest hundredth beside each other.
//!
//! Called with the points of a sweep. Pure. Colours follow the reader's light or dark scheme; the time axis is logarithmic.

use std::fmt::Write;

use super::sweep::Point;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 58.0;
const TOP: f64 = 44.0;
/// Told apart also by those who see few colours, on white and on black (Okabe and Ito 2008).
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#8c8c8c"];

const STYLE: &str = "<style>svg{background:#fff;color:#1b1b1b;font:12px system-ui,sans-serif}text{fill:currentColor}\
.g{stroke:currentColor;stroke-opacity:.15}.a{stroke:currentColor;stroke-opacity:.6}\
@media(prefers-color-scheme:dark){svg{background:#14171a;color:#e8e8e8}}</style>";

/// The picture of points of one cluster; `title` stands above it.
#[must_use]
pub fn svg(points: &[Point], title: &str) -> String {
    let mut policies: Vec<&str> = Vec::new();
    for point in points {
        if !policies.contains(&point.policy.as_str()) {
            policies.push(&point.policy);
        }
    }
    let width = 2.0 * (WIDTH + LEFT) + 30.0;
    let height = TOP + HEIGHT + 70.0 + 18.0 * policies.len().div_ceil(4) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">{STYLE}\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}</text>",
        escaped(title)
    );
    let p50 = |point: &Point| point.summary.ttft.p50;
    let p99 = |point: &Point| point.summary.ttft.p99;
    panel(&mut out, points, &policies, &Panel { x: LEFT, name: "time to first token, p50, ms", value: &p50 });
    let x = LEFT * 2.0 + WIDTH + 10.0;
    panel(&mut out, points, &policies, &Panel { x, name: "time to first token, p99, ms", value: &p99 });
    for (at, policy) in policies.iter().enumerate() {
        let (x, y) = (LEFT + 150.0 * (at % 4) as f64, TOP + HEIGHT + 62.0 + 18.0 * (at / 4) as f64);
        line(&mut out, &[(x, y - 4.0), (x + 22.0, y - 4.0)], COLOURS[at % COLOURS.len()]);
        text(&mut out, (x + 28.0, y), "start", policy);
    }
    out.push_str("</svg>\n");
    out
}

struct Panel<'a> {
    x: f64,
    name: &'a str,
    value: &'a dyn Fn(&Point) -> f64,
}

fn panel(out: &mut String, points: &[Point], policies: &[&str], panel: &Panel<'_>) {
    let by_load = points.iter().all(|point| point.load.is_some());
    let pace = |point: &Point| if by_load { point.load.unwrap_or_default() } else { point.rate };
    let (from, to) = range(points.iter().map(pace));
    let (low, high) = range(points.iter().map(|point| (panel.value)(point).max(0.1).log10()));
    let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
    let x = |pace: f64| panel.x + WIDTH * if to > from { (pace - from) / (to - from) } else { 0.5 };
    let y = |ms: f64| TOP + HEIGHT * (1.0 - (ms.max(0.1).log10() - low) / (high - low));
    grid(out, panel.x, (low, high), &y);
    let mut paces: Vec<f64> = points.iter().map(pace).collect();
    paces.sort_by(f64::total_cmp);
    paces.dedup();
    for one in paces {
        let label = if by_load { format!("{:.0} %", one * 100.0) } else { format!("{one:.1}") };
        text(out, (x(one), TOP + HEIGHT + 16.0), "middle", &label);
    }
    text(out, (panel.x, TOP - 8.0), "start", panel.name);
    let below = if by_load { "arrivals, share of the capacity" } else { "requests a second" };
    text(out, (panel.x + WIDTH / 2.0, TOP + HEIGHT + 34.0), "middle", below);
    for (at, policy) in policies.iter().enumerate() {
        let mut own: Vec<&Point> = points.iter().filter(|point| point.policy == *policy).collect();
        own.sort_by(|a, b| pace(a).total_cmp(&pace(b)));
        let places: Vec<(f64, f64)> = own.iter().map(|point| (x(pace(point)), y((panel.value)(point)))).collect();
        let colour = COLOURS[at % COLOURS.len()];
        line(out, &places, colour);
        for (x, y) in places {
            write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>").ok();
        }
    }
}

/// A line and a label for 1, 2 and 5 of each power of ten.
fn grid(out: &mut String, left: f64, (low, high): (f64, f64), y: &dyn Fn(f64) -> f64) {
    let mut power = low;
    while power <= high {
        for part in [1.0, 2.0, 5.0] {
            let ms = part * 10f64.powf(power);
            if ms.log10() <= high + 1e-9 {
                let (at, right) = (y(ms), left + WIDTH);
                write!(out, "<path class=\"g\" d=\"M{left:.1} {at:.1}H{right:.1}\"/>").ok();
                text(out, (left - 6.0, at + 4.0), "end", &format!("{ms}"));
            }
        }
        power += 1.0;
    }
    let bottom = TOP + HEIGHT;
    write!(out, "<path class=\"a\" fill=\"none\" d=\"M{left:.1} {TOP}V{bottom}H{:.1}\"/>", left + WIDTH).ok();
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN), |(low, high), one| (low.min(one), high.max(one)))
}

fn line(out: &mut String, places: &[(f64, f64)], colour: &str) {
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    write!(out, "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" d=\"M{}\"/>", path.join("L")).ok();
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(words)).ok();
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
