//! Plots live bytes over predicted time, stacked by purpose.

use super::{WIDTH, axis, total};
use crate::render::bytes;
use frit_ir::plan::{BufferId, Plan, Purpose, TaskId, TiSlice, TiVec};
use std::fmt::Write;

const HEIGHT: f64 = 170.0;
const COLUMNS: usize = 500;

/// The color of each purpose, from below.
const COLORS: [&str; Purpose::ALL.len()] = ["b", "d", "a", "c"];

/// The drawing with its legend.
pub(super) fn svg(plan: &Plan, times: &TiSlice<TaskId, (f64, f64)>) -> String {
    let total = total(times);
    let columns = live(plan, times, total);
    let stays = plan.persistent_bytes as f64;
    let sums = columns.iter().map(|c| c.iter().sum::<f64>());
    let (at, live) =
        sums.enumerate().fold((0, 0.0), |best, (i, s)| if s > best.1 { (i, s) } else { best });
    let peak = live + stays;
    let top = (peak.max(plan.persistent_bytes as f64 + plan.workspace_bytes as f64)).max(1.0);
    let y = |bytes: f64| HEIGHT * (1.0 - bytes / top);
    let mut svg = format!("<svg viewBox='0 -6 {WIDTH:.0} {:.0}' role=img>", HEIGHT + 24.0);
    svg += &axis(total, HEIGHT);
    let mut base = vec![stays; COLUMNS];
    let _ = write!(
        svg,
        "<rect class=fe opacity='.35' x='0' y='{:.1}' width='{WIDTH}' \
         height='{:.1}'><title>persistent: {}</title></rect>",
        y(stays),
        HEIGHT - y(stays),
        bytes(plan.persistent_bytes as u64)
    );
    for (k, (purpose, color)) in Purpose::ALL.iter().zip(COLORS).enumerate() {
        let name = purpose.name();
        let upper: Vec<f64> = base.iter().zip(&columns).map(|(b, c)| b + c[k]).collect();
        if upper == base {
            continue;
        }
        let x = |i: usize| WIDTH * i as f64 / COLUMNS as f64;
        let mut points = String::new();
        for (i, u) in upper.iter().enumerate() {
            let _ = write!(points, "{:.1},{:.1} {:.1},{:.1} ", x(i), y(*u), x(i + 1), y(*u));
        }
        for (i, b) in base.iter().enumerate().rev() {
            let _ = write!(points, "{:.1},{:.1} {:.1},{:.1} ", x(i + 1), y(*b), x(i), y(*b));
        }
        let _ = write!(
            svg,
            "<polygon class=f{color} points='{points}'><title>{name}</title></polygon>"
        );
        base = upper;
    }
    let _ = write!(
        svg,
        "<line stroke='var(--f)' stroke-dasharray='4 3' x1='0' x2='{WIDTH}' y1='{0:.1}' y2='{0:.1}'/>\
         <text class=label x='{1:.0}' y='{2:.1}'>peak {3}</text>",
        y(peak),
        (WIDTH * at as f64 / COLUMNS as f64).min(WIDTH - 90.0),
        y(peak) + 11.0,
        bytes(peak as u64)
    );
    let legend: String = Purpose::ALL
        .iter()
        .zip(COLORS)
        .enumerate()
        .filter(|(k, _)| columns.iter().any(|c| c[*k] > 0.0))
        .map(|(_, (purpose, color))| {
            let name = purpose.name();
            format!("<span><i style='background:var(--{color})'></i>{name}</span>")
        })
        .collect();
    let host = match plan.host_bytes {
        0 => String::new(),
        n => format!(", {} in host memory", bytes(n as u64)),
    };
    format!(
        "{svg}</svg><div class=legend>{legend}<span><i style='background:var(--e);opacity:.35'></i>persistent: master weights, \
         optimizer state, inputs ({})</span><span>arena {}, lower bound {}{host}</span></div>",
        bytes(plan.persistent_bytes as u64),
        bytes((plan.persistent_bytes + plan.workspace_bytes) as u64),
        bytes((plan.persistent_bytes + plan.workspace_lower_bound) as u64)
    )
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
