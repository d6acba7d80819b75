//! `frit inspect --view memory`: shows memory by purpose in every part of a step, and every buffer.

use crate::render::{bytes, table};
use frit_ir::Region;
use frit_ir::plan::{Live, Plan, Purpose};
use serde_json::{Value, json};

/// The whole view as text.
pub(super) fn text(plan: &Plan) -> String {
    let purposes = Purpose::ALL.iter().map(|p| p.name());
    let head: Vec<&str> = ["part", "live", "persistent"].into_iter().chain(purposes).collect();
    let row = |(part, live): (String, Live)| {
        let all = plan.persistent_bytes + live.iter().sum::<usize>();
        let cells = [all, plan.persistent_bytes].into_iter().chain(live);
        [vec![part], cells.map(|n| bytes(n as u64)).collect()].concat()
    };
    let rows: Vec<Vec<String>> = parts(plan).into_iter().map(row).collect();
    let arena = plan.persistent_bytes + plan.workspace_bytes;
    let bound = plan.persistent_bytes + plan.workspace_lower_bound;
    let kernels = match plan.kernel_bytes() {
        0 => String::new(),
        n => format!("; kernels need {} in addition", bytes(n as u64)),
    };
    let host = match plan.host_bytes {
        0 => String::new(),
        n => format!("; {} more in host memory", bytes(n as u64)),
    };
    format!(
        "{}\nlive bytes at the peak of each part, tasks in sequence; the arenas hold {}, their\n\
         lower bound with overlapping streams is {}{kernels}{host}\n\n{}",
        table(&head, &rows),
        bytes(arena as u64),
        bytes(bound as u64),
        buffers(plan)
    )
}

/// The parts of a step, each with its peak of live bytes by purpose.
fn parts(plan: &Plan) -> Vec<(String, Live)> {
    let live = plan.live();
    let mut parts: Vec<(String, Live)> = Vec::new();
    for phase in &plan.phases {
        for i in phase.tasks() {
            let (region, live) = (plan.tasks[i].region, &live[i]);
            let name = match region {
                Region::Forward => format!("{}: forward", phase.name),
                Region::Backward | Region::Recompute(_) => format!("{}: backward", phase.name),
                Region::Update => phase.name.to_string(),
            };
            match parts.iter_mut().find(|(part, _)| *part == name) {
                Some((_, most)) if most.iter().sum::<usize>() >= live.iter().sum() => {}
                Some((_, most)) => *most = *live,
                None => parts.push((name, *live)),
            }
        }
    }
    parts
}

/// Every buffer, the largest first.
fn buffers(plan: &Plan) -> String {
    let mut sorted: Vec<_> = plan.buffers.iter().zip(plan.purposes()).collect();
    sorted.sort_by_key(|(b, _)| std::cmp::Reverse(b.bytes));
    let row = |(b, purpose): (&frit_ir::plan::Buffer, Option<Purpose>)| {
        let purpose = purpose.map_or("", Purpose::name).to_string();
        let (size, class) = (bytes(b.bytes as u64), format!("{:?}", b.class));
        vec![size, b.arena.name().into(), class, purpose, b.offset.to_string(), b.name.clone()]
    };
    let rows: Vec<Vec<String>> = sorted.into_iter().map(row).collect();
    table(&["size", "arena", "class", "for", "offset", "name"], &rows)
}

/// Every buffer as JSON.
pub(super) fn json(plan: &Plan) -> Value {
    let purposes = plan.purposes();
    let object = |(b, purpose): (&frit_ir::plan::Buffer, Option<Purpose>)| {
        json!({"name": b.name, "arena": b.arena, "class": b.class, "for": purpose,
               "offset": b.offset, "bytes": b.bytes})
    };
    plan.buffers.iter().zip(purposes).map(object).collect()
}
