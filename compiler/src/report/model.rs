//! Draws the model as it is built: modules nested in modules, once by the units of their parameters and once by the precision of their
//! arithmetic.
//!
//! Modules come from the scopes of tasks and the names of parameters. Siblings with equal content are drawn once.

use super::{duration, escape, quantity};
use frit_ir::DType;
use frit_ir::plan::{Action, ParamHome, Plan, UnitId};
use frit_passes::cost::kernel::is_matrix;
use frit_passes::cost::node_flops;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Colors of units; further units begin again.
const COLORS: usize = 8;

/// Depth to which modules are drawn; what is below counts to the module it is in.
const DEPTH: usize = 12;

/// FLOP of a dtype: of contractions, or of everything else.
type Flops = ((bool, DType), u64);

/// A module with everything in it.
#[derive(Clone, Debug, Default)]
struct Module {
    /// The names of the modules that it stands for.
    names: Vec<String>,
    params: u64,
    units: BTreeSet<UnitId>,
    /// FLOP of a step by dtype: of contractions, and of everything else.
    flops: BTreeMap<(bool, DType), u64>,
    /// Predicted seconds of a step.
    seconds: f64,
    children: Vec<Module>,
}

impl Module {
    fn child(&mut self, name: &str) -> &mut Module {
        let found = self.children.iter().position(|c| c.names[0] == name);
        let i = found.unwrap_or_else(|| {
            self.children.push(Module { names: vec![name.into()], ..Module::default() });
            self.children.len() - 1
        });
        &mut self.children[i]
    }

    /// Applies something to the modules along a path, from the outermost.
    fn along(&mut self, path: &str, apply: &mut impl FnMut(&mut Module)) {
        apply(self);
        let mut module = self;
        for name in path.split('.').filter(|name| !name.is_empty()).take(DEPTH) {
            module = module.child(name);
            apply(module);
        }
    }

    fn contractions(&self) -> u64 {
        self.flops.iter().filter(|((matrix, _), _)| *matrix).map(|(_, n)| n).sum()
    }

    fn all_flops(&self) -> u64 {
        self.flops.values().sum()
    }

    /// Whether another module has the same parameters, contractions and modules. What else is computed in it may differ at the
    /// ends of a model.
    fn is_like(&self, other: &Module) -> bool {
        let alike = |(a, b): (&Module, &Module)| a.names == b.names && a.is_like(b);
        let contractions = |m: &Module| -> Vec<(DType, u64)> {
            let matrix = m.flops.iter().filter(|((matrix, _), _)| *matrix);
            matrix.map(|((_, dtype), n)| (*dtype, *n)).collect()
        };
        self.params == other.params
            && contractions(self) == contractions(other)
            && self.units.len() == other.units.len()
            && self.children.len() == other.children.len()
            && self.children.iter().zip(&other.children).all(alike)
    }

    /// Draws siblings with equal content once.
    fn fold(&mut self) {
        self.children.iter_mut().for_each(Module::fold);
        let mut folded: Vec<Module> = vec![];
        for child in std::mem::take(&mut self.children) {
            match folded.iter_mut().find(|f| f.is_like(&child) && is_number(&child.names[0])) {
                Some(like) if is_number(&like.names[0]) => like.absorb(child),
                _ => folded.push(child),
            }
        }
        self.children = folded;
    }

    /// Adds a module that it also stands for.
    fn absorb(&mut self, other: Module) {
        self.seconds += other.seconds;
        self.units.extend(other.units);
        for (mine, others) in self.children.iter_mut().zip(other.children) {
            mine.absorb(Module { names: vec![], ..others });
        }
        self.names.extend(other.names);
    }

    fn title(&self) -> String {
        match (self.names.as_slice(), ranges(&self.names)) {
            ([], _) => String::new(),
            ([name], _) => name.clone(),
            (names, ranges) => format!("{ranges} ({} alike)", names.len()),
        }
    }
}

fn is_number(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit())
}

/// Numbers as ranges: `0–3, 5`.
fn ranges(names: &[String]) -> String {
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let mut text: Vec<String> = vec![];
    let mut rest = numbers.as_slice();
    while let Some(first) = rest.first() {
        let n = rest.iter().zip(*first..).take_while(|(a, b)| **a == *b).count();
        text.push(if n > 1 { format!("{first}–{}", rest[n - 1]) } else { first.to_string() });
        rest = &rest[n..];
    }
    text.join(", ")
}

/// The modules of a plan with the seconds of its tasks.
fn tree(plan: &Plan, seconds: &[f64]) -> Module {
    let mut root = Module { names: vec!["model".into()], ..Module::default() };
    // Kernels that tasks share are counted once.
    let mut kernels: BTreeMap<usize, Vec<Flops>> = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let runs = plan.runs(i) as u64;
        let flops = match &task.action {
            Action::Kernel { kernel, .. } => {
                let body = &plan.kernels[*kernel].body;
                kernels.entry(kernel.0).or_insert_with(|| {
                    let of = |node: &frit_ir::Node| {
                        let dtype = body.ty(*node.inputs.first()?).dtype;
                        let key = (is_matrix(&node.op), dtype);
                        dtype.is_float().then(|| (key, node_flops(body, node)))
                    };
                    body.nodes().filter_map(|(_, node)| of(node)).collect()
                })
            }
            _ => &mut vec![],
        };
        root.along(&task.origin.scope, &mut |module| {
            module.seconds += runs as f64 * seconds[i.0];
            for (key, n) in flops.iter().filter(|(_, n)| *n > 0) {
                *module.flops.entry(*key).or_default() += runs * n;
            }
        });
    }
    let units = plan.params.iter().filter_map(|param| match param.home {
        ParamHome::Group { group, .. } => Some((param, plan.groups[group].unit)),
        _ => None,
    });
    for (param, unit) in units {
        let path = match param.name.rsplit_once('.') {
            Some((module, _)) => module,
            // Exporters that lose the names of parameters keep units.
            None if unit != UnitId::ROOT => &plan.units[unit].name,
            None => "",
        };
        let numel = param.ty.shape.numel() as u64;
        root.along(path, &mut |module| {
            module.params += numel;
            module.units.insert(unit);
        });
    }
    root.fold();
    root
}

/// Both drawings and a table of the modules. `seconds` are those of the tasks.
pub(super) fn section(plan: &Plan, seconds: &[f64]) -> String {
    let root = tree(plan, seconds);
    let mut dtypes: BTreeMap<DType, u64> = BTreeMap::new();
    for ((matrix, dtype), n) in &root.flops {
        *dtypes.entry(*dtype).or_default() += if *matrix { *n } else { 0 };
    }
    let swatch = |class: String, text: &str| format!("<span><i class={class}></i>{text}</span>");
    let legend: String = dtypes.keys().map(|d| swatch(format!("t-{d}"), d.name())).collect();
    let mut rows = String::new();
    let mut table = Table { plan, all: root.all_flops().max(1), rows: &mut rows };
    table.add(&root, 0);
    format!(
        "<h3>Units <small>width by parameters; a color is a unit, gathered and reduced as one</small></h3>\
         <div class=tree>{}</div>\
         <h3>Precision <small>width by floating-point operations; colors by the dtype of contractions, or of the rest where there are none\
         </small></h3><div class=tree>{}</div><div class=legend>{legend}<span>stripes: several dtypes, by their shares</span></div>\
         <details><summary>modules as a table</summary><div class=scroll><table><tr><th>module<th class=n>parameters\
         <th>units<th>contractions<th class=n>FLOP<th class=n>share<th class=n>predicted{rows}</table></div></details>",
        boxes(&root, &|m| m.params, &|m| unit_look(plan, m)),
        boxes(&root, &Module::all_flops, &precision_look),
    )
}

/// The look of a module: a style, and what is said of it.
type Look<'a> = &'a dyn Fn(&Module) -> (String, String);

/// A module as a box with the boxes of its modules, side by side by their weights.
fn boxes(module: &Module, weight: &dyn Fn(&Module) -> u64, look: Look<'_>) -> String {
    let (style, says) = look(module);
    let title = escape(&module.title());
    let inside: Vec<&Module> = module.children.iter().filter(|c| weight(c) > 0).collect();
    let in_children = inside.iter().map(|c| c.names.len().max(1) as u64 * weight(c)).sum();
    let own = weight(module).saturating_sub(in_children);
    let mut html = format!(
        "<div class='m{}' style='--w:{}{style}' title=\"{title}: {says}\"><b>{title}</b>",
        if inside.is_empty() { " leaf" } else { "" },
        (weight(module) * module.names.len().max(1) as u64).max(1),
    );
    if inside.is_empty() {
        let _ = write!(html, "<small>{says}</small>");
    } else {
        html += "<div>";
        html.extend(inside.iter().map(|child| boxes(child, weight, look)));
        if own * 50 > weight(module) {
            let _ = write!(
                html,
                "<div class='m own' style='--w:{own}' title='directly in {title}'></div>"
            );
        }
        html += "</div>";
    }
    html + "</div>"
}

fn unit_look(plan: &Plan, module: &Module) -> (String, String) {
    let each = if module.names.len() > 1 { "each " } else { "" };
    let params = format!("{each}{} parameters", quantity(module.params as f64, "").trim());
    let names: Vec<&str> = module.units.iter().map(|u| plan.units[*u].name.as_str()).collect();
    let stripes: Vec<(String, f64)> = module
        .units
        .iter()
        .take(24)
        .map(|unit| (format!("var(--c{})", unit.0 % COLORS), 1.0))
        .collect();
    let says = match names.as_slice() {
        [] => params,
        [unit] => format!("{params}, unit {}", escape(unit)),
        units => format!("{params}, in {} units", units.len()),
    };
    (background(&stripes), says)
}

fn precision_look(module: &Module) -> (String, String) {
    let matrix = module.contractions() > 0;
    let of: Vec<(DType, u64)> = module
        .flops
        .iter()
        .filter(|((m, _), _)| *m == matrix)
        .map(|((_, d), n)| (*d, *n))
        .collect();
    let all: u64 = of.iter().map(|(_, n)| n).sum();
    let share = |n: u64| n as f64 / all.max(1) as f64;
    let stripes: Vec<(String, f64)> =
        of.iter().map(|(d, n)| (format!("var(--t-{d})"), share(*n))).collect();
    let dtypes: Vec<String> = match of.as_slice() {
        [(dtype, _)] => vec![dtype.to_string()],
        of => of.iter().map(|(d, n)| format!("{:.0} % {d}", 100.0 * share(*n))).collect(),
    };
    let says = format!("{}, {}", quantity(module.all_flops() as f64, "FLOP"), dtypes.join(", "));
    (background(&stripes), says)
}

/// A style with colors side by side, by their shares.
fn background(stripes: &[(String, f64)]) -> String {
    let all: f64 = stripes.iter().map(|(_, share)| share).sum();
    match stripes {
        [] => String::new(),
        [(color, _)] => format!(";--bgm:{color}"),
        stripes => {
            let mut from = 0.0;
            let mut parts = vec![];
            for (color, share) in stripes {
                let to = from + 100.0 * share / all;
                parts.push(format!("{color} {from:.0}% {to:.0}%"));
                from = to;
            }
            format!(";--bgm:linear-gradient(90deg,{})", parts.join(","))
        }
    }
}

/// The modules as rows.
struct Table<'a> {
    plan: &'a Plan,
    all: u64,
    rows: &'a mut String,
}

impl Table<'_> {
    fn add(&mut self, module: &Module, depth: usize) {
        let units = match module.units.len() {
            0 => "–".to_string(),
            1 => {
                let unit = module.units.first().expect("invariant: there is one");
                escape(&self.plan.units[*unit].name)
            }
            n => format!("{n} units"),
        };
        let contractions = module.flops.iter().filter(|((matrix, _), _)| *matrix);
        let dtypes: Vec<&str> = contractions.map(|((_, dtype), _)| dtype.name()).collect();
        let _ = write!(
            self.rows,
            "<tr><td style='padding-left:{depth}em'>{}<td class=n>{}<td>{units}<td>{}<td class=n>{}<td class=n>{:.1} %<td class=n>{}",
            escape(&module.title()),
            quantity(module.params as f64, ""),
            dtypes.join(", "),
            quantity(module.all_flops() as f64, ""),
            100.0 * module.all_flops() as f64 / self.all as f64,
            duration(1e6 * module.seconds),
        );
        module.children.iter().for_each(|child| self.add(child, depth + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(name: &str, params: u64) -> Module {
        Module { names: vec![name.into()], params, ..Module::default() }
    }

    #[test]
    fn equal_numbered_modules_are_drawn_once() {
        let mut root = module("model", 0);
        for (i, params) in [5, 5, 7, 5].into_iter().enumerate() {
            let path = format!("h.{i}.fc");
            root.along(&path, &mut |m| m.params += params);
        }
        root.along("a", &mut |m| m.params += 1);
        root.along("b", &mut |m| m.params += 1);
        root.fold();
        let h = &root.children[0];
        let titles: Vec<String> = h.children.iter().map(Module::title).collect();
        assert_eq!(titles, ["0–1, 3 (3 alike)", "2"]);
        assert_eq!(root.children.len(), 3, "names that are no numbers tell modules apart");
        assert_eq!(ranges(&["7".into(), "1".into(), "2".into()]), "1–2, 7");
    }

    #[test]
    fn colors_lie_side_by_side_by_their_shares() {
        assert_eq!(background(&[]), "");
        let two = [("red".to_string(), 1.0), ("blue".to_string(), 3.0)];
        assert_eq!(background(&two), ";--bgm:linear-gradient(90deg,red 0% 25%,blue 25% 100%)");
    }
}
