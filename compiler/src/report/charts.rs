//! Draws the curves of runs over their steps, several runs in one chart.

use super::axis::Axis;
use super::runs::{Curve, Run, Series, VALIDATION_LOSS};
use super::{duration, escape, quantity};
use crate::render::bytes;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Units of a drawing, along and across.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 300.0;

/// Steps of a curve that are drawn one by one; of more, each column has its lowest and its highest.
const DRAWN: usize = 1000;

/// Colors of runs; further runs begin again.
pub(super) const COLORS: usize = 8;

/// What a plan predicts, as lines across charts.
pub(super) struct Predicted {
    pub(super) step_seconds: f64,
    pub(super) rate: f64,
    pub(super) memory: f64,
}

/// A chart: its curves with the class of their lines and the run of each.
struct Chart<'a> {
    title: String,
    sub: String,
    curves: Vec<(usize, &'static str, Curve)>,
    /// A number that the plan predicts, if any, and what it is.
    predicted: Option<(f64, &'a str)>,
    kind: Kind,
    text: fn(f64) -> String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// From the lowest to the highest.
    Range,
    /// The same, logarithmic where the curves span two orders of magnitude.
    Log,
    /// By powers of two.
    Powers,
    /// From 0; the few highest are cut.
    FromZero,
}

/// The charts, as far as the runs have what they show.
pub(super) fn charts(runs: &[Run], predicted: &Predicted) -> String {
    let curves = |series: Series, class: &'static str| -> Vec<(usize, &'static str, Curve)> {
        runs.iter().enumerate().map(|(i, run)| (i, class, run.curve(series))).collect()
    };
    let validation = |name: &str| -> Vec<(usize, &'static str, Curve)> {
        runs.iter().enumerate().map(|(i, run)| (i, "dots", run.validation(name))).collect()
    };
    let chart = |title: &str, sub: &str, curves, kind, text| Chart {
        title: title.into(),
        sub: sub.into(),
        curves,
        predicted: None,
        kind,
        text,
    };
    let mut losses = curves(Series::Loss, "line");
    losses.extend(curves(Series::Loss, "smooth").into_iter().filter_map(smoothed));
    let validated = validation(VALIDATION_LOSS);
    let has_validation = validated.iter().any(|(.., curve)| !curve.is_empty());
    losses.extend(validated);
    let sub = if has_validation { "of steps; dots: of validations" } else { "of steps" };
    let mut all = vec![chart("Loss", sub, losses, Kind::Range, number)];
    let names: BTreeSet<&str> = runs.iter().flat_map(Run::validation_metrics).collect();
    for name in names {
        all.push(chart(name, "of validations", validation(name), Kind::Range, number));
    }
    all.push(chart("Learning rate", "", curves(Series::Lr, "line"), Kind::Range, number));
    let sub = "before clipping";
    all.push(chart("Gradient norm", sub, curves(Series::GradNorm, "line"), Kind::Log, number));
    let scales = curves(Series::LossScale, "line");
    if scales.iter().any(|(.., curve)| curve.iter().any(|(_, scale)| *scale != 1.0)) {
        all.push(chart("Loss scale", "", scales, Kind::Powers, power));
    }
    if runs.iter().any(|run| run.skipped().next().is_some()) {
        let skipped = runs.iter().enumerate().map(|(i, run)| (i, "line", skipped(run))).collect();
        all.push(chart("Skipped steps", "so far", skipped, Kind::FromZero, number));
    }
    let rate = curves(Series::Rate, "line");
    let title = "Throughput";
    let sub = "tokens or examples";
    let rate = chart(title, sub, rate, Kind::FromZero, |x| quantity(x, "/s"));
    all.push(Chart { predicted: Some((predicted.rate, "predicted")), ..rate });
    let times = curves(Series::StepSeconds, "line");
    let times = chart("Step time", "", times, Kind::FromZero, |x| duration(1e6 * x));
    all.push(Chart { predicted: Some((predicted.step_seconds, "predicted")), ..times });
    let memory = curves(Series::Memory, "line");
    let memory = chart("Memory", "in use", memory, Kind::FromZero, |x| bytes(x as u64));
    all.push(Chart { predicted: Some((predicted.memory, "planned")), ..memory });
    let drawn: String = all.iter().filter_map(|chart| chart.draw(runs)).collect();
    format!("<div class=charts>{drawn}</div>")
}

/// The number of skipped steps so far.
fn skipped(run: &Run) -> Curve {
    let mut curve = vec![(0, 0.0)];
    for step in run.skipped() {
        let n = curve.len() as f64;
        curve.push((step, n));
    }
    curve.extend(run.last().map(|last| (last, (curve.len() - 1) as f64)));
    curve
}

/// A long curve without its noise.
fn smoothed(
    (run, class, curve): (usize, &'static str, Curve),
) -> Option<(usize, &'static str, Curve)> {
    if curve.len() < 100 {
        return None;
    }
    let weight = 1.0 / (curve.len() as f64 / 50.0).clamp(5.0, 200.0);
    let mut mean = curve[0].1;
    let smooth = curve.iter().map(|(step, value)| {
        mean += weight * (value - mean);
        (*step, mean)
    });
    Some((run, class, smooth.collect()))
}

/// At most about [`DRAWN`] points: of each column its lowest and its highest, in their order.
fn thinned(curve: &Curve) -> Curve {
    if curve.len() <= DRAWN {
        return curve.clone();
    }
    let mut thin = vec![];
    for column in curve.chunks(curve.len().div_ceil(DRAWN / 2)) {
        let by_value = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
        let (low, high) = (column.iter().min_by(by_value), column.iter().max_by(by_value));
        let mut ends: Vec<(usize, f64)> = low.into_iter().chain(high).copied().collect();
        ends.sort_by_key(|(step, _)| *step);
        ends.dedup();
        thin.extend(ends);
    }
    thin
}

impl Chart<'_> {
    /// Nothing if there is nothing to draw.
    fn draw(&self, runs: &[Run]) -> Option<String> {
        let points = || self.curves.iter().flat_map(|(.., curve)| curve);
        let steps = points().map(|(step, _)| *step as f64);
        let last = runs.iter().filter_map(Run::last).max()? as f64;
        let first = steps.fold(f64::INFINITY, f64::min);
        if first.is_infinite() {
            return None;
        }
        let first = runs.iter().filter_map(Run::first).min().map_or(first, |s| first.min(s as f64));
        let x = Axis::linear(first, last);
        let (y, cut) = self.range(points().map(|(_, value)| *value).collect());
        let mut svg = String::new();
        if let Some((value, _)) = self.predicted.filter(|(value, _)| y.at(*value) <= 1.0) {
            let at = HEIGHT * (1.0 - y.at(value));
            let _ = write!(svg, "<path class=predicted d='M0 {at:.1}H{WIDTH:.0}'/>");
        }
        let mut dots = String::new();
        for (run, class, curve) in self.curves.iter().filter(|(.., curve)| !curve.is_empty()) {
            let (curve, color) = (thinned(curve), run % COLORS);
            let mut d = String::new();
            for (i, (step, value)) in curve.iter().enumerate() {
                let (left, top) = (x.at(*step as f64), 1.0 - y.at(*value));
                let letter = if i == 0 { 'M' } else { 'L' };
                let _ = write!(d, "{letter}{:.1} {:.2}", WIDTH * left, HEIGHT * top);
                if *class == "dots" {
                    let (left, top) = (100.0 * left, 100.0 * top);
                    let _ = write!(
                        dots,
                        "<b class='k{color}' data-run={run} style='left:{left:.2}%;top:{top:.2}%'></b>"
                    );
                }
            }
            let _ = write!(svg, "<path class='{class} c{color}' data-run={run} d='{d}'/>");
        }
        let label = self.predicted.filter(|(value, _)| y.at(*value) <= 1.0).map(|(value, what)| {
            let top = 100.0 * (1.0 - y.at(value));
            let below = if top < 12.0 { " below" } else { "" };
            let value = escape(&(self.text)(value));
            format!("<em class='mark{below}' style='top:{top:.2}%'>{what} {value}</em>")
        });
        let more = match cut {
            0 => String::new(),
            n => format!("; {n} above the edge"),
        };
        let sub = format!("{}{more}", self.sub);
        Some(format!(
            "<figure class=chart data-x0={} data-x1={} data-y0={} data-y1={} data-log={} data-form={}>\
             <figcaption>{} <small>{}</small></figcaption><div class=plot>{}{}\
             <svg viewBox='0 0 {WIDTH:.0} {HEIGHT:.0}' preserveAspectRatio=none role=img \
             aria-label='{}'>{svg}</svg>{dots}{}</div></figure>\n",
            x.from,
            x.to,
            y.from,
            y.to,
            u8::from(y.log),
            self.form(),
            escape(&self.title),
            escape(sub.trim_start_matches("; ")),
            y.beside(4, self.text),
            x.below(5, step),
            escape(&self.title),
            label.unwrap_or_default(),
        ))
    }

    /// How the script writes its numbers.
    fn form(&self) -> &'static str {
        match self.title.as_str() {
            "Step time" => "seconds",
            "Memory" => "bytes",
            _ => "number",
        }
    }

    /// The range of the numbers, and how many of them are above it.
    fn range(&self, mut values: Vec<f64>) -> (Axis, usize) {
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[0], values[values.len() - 1]);
        let predicted = self.predicted.map_or(0.0, |(value, _)| value);
        let y = match self.kind {
            Kind::Log if low > 0.0 && high / low > 100.0 => Axis::log(low / 1.1, high * 1.1),
            Kind::Powers if low > 0.0 => Axis::log(low / 2.0, high * 2.0),
            Kind::FromZero => {
                let usual = values[(values.len() - 1) * 49 / 50];
                // A prediction far away would flatten what was measured.
                let predicted = if predicted < 4.0 * usual { predicted } else { 0.0 };
                let top = if high < 1.6 * usual { high } else { 1.2 * usual };
                Axis::linear(0.0, 1.08 * top.max(predicted))
            }
            _ => {
                let flat = high - low < 1e-9 * high.abs();
                let pad = if flat { 0.5 * high.abs() } else { 0.05 * (high - low) };
                let floor = if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
                Axis::linear((low - pad).max(floor), high + pad)
            }
        };
        let y = if self.title == "Memory" { y.of_bytes() } else { y };
        let cut = values.iter().filter(|value| y.at(**value) > 1.0).count();
        (y, cut)
    }
}

fn step(x: f64) -> String {
    if x >= 10_000.0 { quantity(x, "").trim().replace(".00", "") } else { format!("{x:.0}") }
}

fn power(x: f64) -> String {
    if x < 16_384.0 { format!("{x}") } else { format!("2^{:.0}", x.log2()) }
}

/// A number with three digits or so.
pub(super) fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if a < 1e-3 => format!("{x:.1e}").replace(".0e", "e"),
        a if a < 0.1 => trimmed(format!("{x:.4}")),
        a if a < 10.0 => trimmed(format!("{x:.3}")),
        a if a < 1e4 => trimmed(format!("{x:.1}")),
        _ => quantity(x, "").trim().into(),
    }
}

fn trimmed(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_curves_keep_their_extremes() {
        let mut curve: Curve = (0..100_000).map(|i| (i, (i % 7) as f64)).collect();
        (curve[31_415].1, curve[27_182].1) = (99.0, -5.0);
        let thin = thinned(&curve);
        assert!(thin.len() <= DRAWN, "{}", thin.len());
        assert!(thin.contains(&(31_415, 99.0)) && thin.contains(&(27_182, -5.0)));
        assert!(thin.windows(2).all(|w| w[0].0 < w[1].0));
        let short: Curve = (0..1000).map(|i| (i, 1.0)).collect();
        assert_eq!(thinned(&short), short);
    }

    #[test]
    fn a_slow_first_step_is_cut_and_told() {
        let chart = Chart {
            title: "Step time".into(),
            sub: String::new(),
            curves: vec![],
            predicted: Some((0.02, "predicted")),
            kind: Kind::FromZero,
            text: number,
        };
        let mut values = vec![0.01; 99];
        values.push(5.0);
        let (y, cut) = chart.range(values);
        assert!(y.to < 0.03 && y.at(0.02) < 1.0, "{y:?}");
        assert_eq!(cut, 1);
    }

    #[test]
    fn numbers_are_short() {
        for (x, text) in [
            (0.0, "0"),
            (0.0003, "3e-4"),
            (0.05, "0.05"),
            (2.5, "2.5"),
            (123.0, "123"),
            (65536.0, "65.54 k"),
        ] {
            assert_eq!(number(x), text);
        }
        assert_eq!(power(65536.0), "2^16");
    }
}
