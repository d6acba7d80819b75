//! Plots live bytes over predicted time, stacked by purpose.

use super::axis::Axis;
use super::{duration, total};
use crate::render::bytes;
use frit_ir::plan::{BufferId, Plan, Purpose, TaskId, TiSlice, TiVec};
use std::fmt::Write;

/// Units of the drawing.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 200.0;
const COLUMNS: usize = 500;

/// The color of each purpose, from below.
const COLORS: [&str; Purpose::ALL.len()] = ["b", "d", "a", "c"];

/// The drawing with its legend.
pub(super) fn drawing(plan: &Plan, times: &TiSlice<TaskId, (f64, f64)>) -> String {
    let total = total(times);
    let columns = live(plan, times, total);
    let stays = plan.persistent_bytes as f64;
    let sums = columns.iter().map(|c| c.iter().sum::<f64>());
    let (at, live) =
        sums.enumerate().fold((0, 0.0), |best, (i, s)| if s > best.1 { (i, s) } else { best });
    let peak = live + stays;
    let top = (peak.max(plan.persistent_bytes as f64 + plan.workspace_bytes as f64)).max(1.0);
    let axis = Axis::linear(0.0, 1.06 * top).of_bytes();
    let y = |bytes: f64| HEIGHT * (1.0 - axis.at(bytes));
    let mut svg =
        format!("<path class='fe stays' d='M0 {:.1}h{WIDTH:.0}V{HEIGHT:.0}H0z'/>", y(stays));
    let mut base = vec![stays; COLUMNS];
    for (k, color) in COLORS.iter().enumerate() {
        let upper: Vec<f64> = base.iter().zip(&columns).map(|(b, c)| b + c[k]).collect();
        if upper == base {
            continue;
        }
        let mut d = format!("M0 {:.1}", y(upper[0]));
        outline(&mut d, upper.iter().enumerate().map(|(i, u)| (i, i + 1, y(*u))));
        outline(&mut d, base.iter().enumerate().rev().map(|(i, b)| (i + 1, i, y(*b))));
        let _ = write!(svg, "<path class=f{color} d='{d}z'/>");
        base = upper;
    }
    let _ = write!(svg, "<path class=predicted d='M0 {:.1}H{WIDTH:.0}'/>", y(peak));
    let left = 100.0 * at as f64 / COLUMNS as f64;
    let edge = if left > 75.0 { "right:0".into() } else { format!("left:{left:.1}%") };
    let label = format!(
        "<em class=mark style='top:{:.1}%;{edge}'>peak {}</em>",
        100.0 * (1.0 - axis.at(peak)),
        bytes(peak as u64)
    );
    let legend: String = Purpose::ALL
        .iter()
        .zip(COLORS)
        .enumerate()
        .filter(|(k, _)| columns.iter().any(|c| c[*k] > 0.0))
        .map(|(_, (purpose, color))| {
            format!("<span><i class=g{color}></i>{}</span>", purpose.name())
        })
        .collect();
    let host = match plan.host_bytes {
        0 => String::new(),
        n => format!(", {} in host memory", bytes(n as u64)),
    };
    format!(
        "<figure class='chart wide'><div class=plot>{}{}<svg viewBox='0 0 {WIDTH:.0} {HEIGHT:.0}' \
         preserveAspectRatio=none role=img aria-label='bytes over time'>{svg}</svg>{label}</div></figure>\
         <div class=legend>{legend}<span><i class='ge stays'></i>persistent: master weights, \
         optimizer state, inputs ({})</span><span>arena {}, lower bound {}{host}</span></div>",
        axis.beside(4, |x| bytes(x as u64)),
        Axis::linear(0.0, total).below(6, duration),
        bytes(plan.persistent_bytes as u64),
        bytes((plan.persistent_bytes + plan.workspace_bytes) as u64),
        bytes((plan.persistent_bytes + plan.workspace_lower_bound) as u64)
    )
}

/// Steps from column to column, those of one height as one.
fn outline(d: &mut String, steps: impl Iterator<Item = (usize, usize, f64)>) {
    let x = |column: usize| WIDTH * column as f64 / COLUMNS as f64;
    let mut last: Option<(f64, usize)> = None;
    for (_, to, y) in steps {
        if let Some((height, until)) = last
            && (height - y).abs() > 0.05
        {
            let _ = write!(d, "H{:.0}V{y:.1}", x(until));
        } else if last.is_none() {
            let _ = write!(d, "V{y:.1}");
        }
        last = Some((y, to));
    }
    if let Some((_, until)) = last {
        let _ = write!(d, "H{:.0}", x(until));
    }
}

/// The most bytes live within each column of time, by purpose.
fn live(
    plan: &Plan,
    times: &TiSlice<TaskId, (f64, f64)>,
    total: f64,
) -> Vec<[f64; Purpose::ALL.len()]> {
    let mut span: TiVec<BufferId, Option<(f64, f64)>> = vec![None; plan.buffers.len()].into();
    for (task, &(start, end)) in plan.tasks.iter().zip(times) {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            let s = span[place.buffer].get_or_insert((start, end));
            (s.0, s.1) = (s.0.min(start), s.1.max(end));
        }
    }
    let mut columns = vec![[0.0; Purpose::ALL.len()]; COLUMNS];
    let column = |t: f64| ((COLUMNS as f64 * t / total) as usize).min(COLUMNS - 1);
    for ((buffer, span), purpose) in plan.buffers.iter().zip(&span).zip(plan.purposes()) {
        let (Some(purpose), Some((start, end))) = (purpose, span) else { continue };
        // A column that a buffer only ends in shows what follows.
        let last = column(*end).max(column(*start) + 1).min(COLUMNS);
        let columns = &mut columns[column(*start)..last];
        columns.iter_mut().for_each(|c| c[purpose as usize] += buffer.bytes as f64);
    }
    columns
}
