//! Which tensor of a file is which parameter, where other libraries name them otherwise: below another prefix, such as that of the module
//! that was wrapped for the export, of a compiled or a parallel module, or of the base model; or a tied table by its other name.
//!
//! Names are compared by whole parts between dots. A prefix is replaced by another in all names that begin with it, and the others are
//! equal; nothing is renamed if that explains no more tensors than the names as they are, or as many as another replacement does. A
//! prefix that is not added or removed but exchanged is that of everything but tied tables, or else it would be another module.

use crate::weight_files::PEFT_PREFIX;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The last module of a tied pair, under either of its names.
const TIED: [&str; 16] = [
    "decoder",
    "embed",
    "embed_in",
    "embed_out",
    "embed_tokens",
    "embedding",
    "embeddings",
    "head",
    "lm_head",
    "output",
    "predictions",
    "proj_out",
    "shared",
    "tok_embeddings",
    "word_embeddings",
    "wte",
];

/// Tensors by parameter.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Names<'n> {
    /// Pairs of a parameter and its tensor.
    pub(crate) tensors: BTreeMap<&'n str, &'n str>,
    /// Other tensors that repeat one of these.
    pub(crate) copies: BTreeSet<&'n str>,
    /// What is named otherwise, in words.
    pub(crate) notes: Vec<String>,
}

/// Finds the tensors of parameters, given the names and shapes of both, and whether two tensors have the same elements.
pub(crate) fn find<'n>(
    params: &BTreeMap<&'n str, &[usize]>,
    tensors: &BTreeMap<&'n str, &[usize]>,
    same: impl Fn(&str, &str) -> bool,
) -> Names<'n> {
    let prefixes = replaced(params, tensors);
    let mut names = Names { tensors: paired(prefixes, params, tensors), ..Names::default() };
    // That of adapters says nothing about the model.
    if let Some((of_plan, of_file)) = prefixes.filter(|p| *p != ("", PEFT_PREFIX)) {
        let quoted = |prefix: &str| match prefix {
            "" => "no prefix".to_owned(),
            prefix => format!("`{prefix}`"),
        };
        names.notes.push(format!(
            "names of parameters have {} where those of the tensors have {}",
            quoted(of_plan),
            quoted(of_file)
        ));
    }
    let taken: BTreeSet<&str> = names.tensors.values().copied().collect();
    let mut left: Vec<&str> = tensors.keys().copied().filter(|t| !taken.contains(t)).collect();
    let missing = params.keys().copied().filter(|p| !names.tensors.contains_key(p));
    let missing: Vec<&str> = missing.collect();
    for param in &missing {
        let alike = |name: &&str, shape: &[usize]| is_table(name) && shape == params[param];
        let found: Vec<&str> = left.iter().copied().filter(|t| alike(t, tensors[t])).collect();
        let rivals = missing.iter().filter(|p| alike(p, params[*p])).count();
        let [first, others @ ..] = &found[..] else { continue };
        if is_table(param) && rivals == 1 && others.iter().all(|other| same(first, other)) {
            names.tensors.insert(param, first);
            names.notes.push(format!("`{param}` is the tied `{first}`"));
            left.retain(|t| t != first);
        }
    }
    let taken = names.tensors.values().copied();
    let tables: Vec<&str> = taken.filter(|t| is_table(t)).collect();
    let repeats = |name: &&str, of: &&str| tensors[name] == tensors[of] && same(name, of);
    let is_copy = |t: &&str| is_table(t) && tables.iter().any(|table| repeats(t, table));
    names.copies = left.into_iter().filter(is_copy).collect();
    names
}

/// Whether a name is one of a matrix that models tie.
fn is_table(name: &str) -> bool {
    let mut parts = name.rsplit('.');
    parts.next() == Some("weight") && parts.next().is_some_and(|module| TIED.contains(&module))
}

/// A prefix of parameters and that of tensors in its place, each empty or with its last dot.
type Prefixes<'n> = (&'n str, &'n str);

/// The prefixes that explain more tensors than all others and than none.
fn replaced<'n>(
    params: &BTreeMap<&'n str, &[usize]>,
    tensors: &BTreeMap<&'n str, &[usize]>,
) -> Option<Prefixes<'n>> {
    let own = paired(None, params, tensors).len();
    if own == tensors.len() {
        return None;
    }
    let mut ending: HashMap<&str, Vec<&str>> = HashMap::new();
    for param in params.keys() {
        ending.entry(ending_of(param)).or_default().push(param);
    }
    // How many tensors each pair of prefixes renames.
    let mut candidates: BTreeMap<Prefixes<'n>, usize> = BTreeMap::new();
    for tensor in tensors.keys() {
        for param in ending.get(ending_of(tensor)).into_iter().flatten() {
            *candidates.entry(differing(param, tensor)).or_default() += 1;
        }
    }
    let mut candidates: Vec<_> = candidates.into_iter().filter(|((a, b), _)| a != b).collect();
    candidates.sort_by_key(|(_, renamed)| Reverse(*renamed));
    // The best, and how many tensors it and its best rival explain.
    let (mut best, mut most, mut rival) = (None, own, own);
    for (prefixes, renamed) in candidates {
        if renamed + own < most {
            break;
        }
        if !is_wrapper(prefixes, params, tensors) || !is_injective(prefixes, params) {
            continue;
        }
        let explained = paired(Some(prefixes), params, tensors).len();
        if explained > most {
            (best, rival, most) = (Some(prefixes), most, explained);
        } else {
            rival = rival.max(explained);
        }
    }
    best.filter(|_| most > rival)
}

/// Whether a prefix is added or removed, or is that of everything on both sides.
fn is_wrapper(
    (of_plan, of_file): Prefixes<'_>,
    params: &BTreeMap<&str, &[usize]>,
    tensors: &BTreeMap<&str, &[usize]>,
) -> bool {
    let has = |name: &&str, prefix: &str| name.starts_with(prefix) || is_table(name);
    let of_all = params.keys().all(|p| has(p, of_plan)) && tensors.keys().all(|t| has(t, of_file));
    of_plan.is_empty() || of_file.is_empty() || of_all
}

/// The last two parts of a name.
fn ending_of(name: &str) -> &str {
    let before = name.rmatch_indices('.').nth(1);
    before.map_or(name, |(dot, _)| &name[dot + 1..])
}

/// What is before the parts that two names end with.
fn differing<'n>(param: &'n str, tensor: &'n str) -> Prefixes<'n> {
    let parts = param.rsplit('.').zip(tensor.rsplit('.')).take_while(|(a, b)| a == b);
    let equal: usize = parts.map(|(part, _)| part.len() + 1).sum();
    let before = |name: &'n str| &name[..(name.len() + 1).saturating_sub(equal)];
    (before(param), before(tensor))
}

/// The name of the tensor of a parameter.
fn renamed(param: &str, prefixes: Prefixes<'_>) -> String {
    let (of_plan, of_file) = prefixes;
    param.strip_prefix(of_plan).map_or_else(|| param.to_owned(), |rest| format!("{of_file}{rest}"))
}

/// Whether no two parameters get one name.
fn is_injective(prefixes: Prefixes<'_>, params: &BTreeMap<&str, &[usize]>) -> bool {
    let names: BTreeSet<String> = params.keys().map(|param| renamed(param, prefixes)).collect();
    names.len() == params.len()
}

/// Parameters and tensors whose names are equal once the prefix is replaced.
fn paired<'n>(
    prefixes: Option<Prefixes<'_>>,
    params: &BTreeMap<&'n str, &[usize]>,
    tensors: &BTreeMap<&'n str, &[usize]>,
) -> BTreeMap<&'n str, &'n str> {
    let tensor = |param: &str| {
        let name = prefixes.map_or_else(|| param.to_owned(), |p| renamed(param, p));
        tensors.get_key_value(name.as_str()).map(|(tensor, _)| *tensor)
    };
    params.keys().filter_map(|param| Some((*param, tensor(param)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of a model with two layers and, unless tied, a head.
    fn model(prefix: &str, base: &str, head: Option<&str>) -> Vec<String> {
        let layer = |i| ["q", "up"].map(|m| format!("{prefix}{base}layers.{i}.{m}.weight"));
        let norm = ["layers.0.norm", "layers.1.norm", "norm"];
        let norms = norm.map(|n| format!("{prefix}{base}{n}.weight"));
        let table = format!("{prefix}{base}embed_tokens.weight");
        let head = head.map(|head| format!("{prefix}{head}"));
        [0, 1].into_iter().flat_map(layer).chain(norms).chain([table]).chain(head).collect()
    }

    fn shapes(names: &[String]) -> BTreeMap<&str, &[usize]> {
        let shape = |name: &str| match () {
            () if is_table(name) => &[7, 4][..],
            () if name.ends_with("norm.weight") => &[4],
            () => &[4, 4],
        };
        names.iter().map(|name| (name.as_str(), shape(name))).collect()
    }

    /// How many parameters have a tensor, and the notes; tables have the same elements if `tied`.
    fn found(plan: &[String], file: &[String], tied: bool) -> (usize, usize, Vec<String>) {
        let (params, tensors) = (shapes(plan), shapes(file));
        let names = find(&params, &tensors, |_, _| tied);
        for (param, tensor) in &names.tensors {
            assert_eq!(params[param], tensors[tensor]);
        }
        (names.tensors.len(), names.copies.len(), names.notes)
    }

    #[test]
    fn prefixes_are_replaced() {
        let (own, none) = (model("", "model.", Some("lm_head.weight")), "no prefix");
        assert_eq!(found(&own, &own, false), (9, 0, vec![]));
        let adapted = model(PEFT_PREFIX, "model.", Some("lm_head.weight"));
        assert_eq!(found(&own, &adapted, false), (9, 0, vec![]));
        for prefix in ["net.", "module.", "_orig_mod.", "a.b."] {
            let other = model(prefix, "model.", Some("lm_head.weight"));
            let note = |plan: &str, file: &str| {
                format!("names of parameters have {plan} where those of the tensors have {file}")
            };
            let quoted = format!("`{prefix}`");
            assert_eq!(found(&other, &own, false), (9, 0, vec![note(&quoted, none)]));
            assert_eq!(found(&own, &other, false), (9, 0, vec![note(none, &quoted)]));
            let third = model("x.", "model.", Some("lm_head.weight"));
            assert_eq!(found(&third, &other, false), (9, 0, vec![note("`x.`", &quoted)]));
        }
        // A base model within another, whose head is not in it.
        let bare = model("", "", Some("lm_head.weight"));
        assert_eq!(found(&own, &bare, false).0, 9);
        assert_eq!(found(&bare, &own, false).0, 9);
    }

    #[test]
    fn a_tied_table_is_found_by_its_other_name() {
        let table = "model.embed_tokens.weight";
        let mut head = model("", "model.", Some("lm_head.weight"));
        head.retain(|name| name != table);
        let tied = model("", "model.", None);
        for (plan, file) in [(&head, &tied), (&tied, &head)] {
            let (count, copies, notes) = found(plan, file, false);
            assert_eq!((count, copies), (8, 0));
            assert!(notes[0].contains("is the tied"), "{notes:?}");
        }
        let wrapped: Vec<String> = head.iter().map(|name| format!("net.{name}")).collect();
        assert_eq!(found(&wrapped, &model("", "", None), false).0, 8);
        assert_eq!(found(&wrapped, &tied, false).2.len(), 2);
        // Both names in the file: a copy if the elements are equal, and else another tensor.
        let both = model("", "model.", Some("lm_head.weight"));
        assert_eq!(found(&tied, &both, true), (8, 1, vec![]));
        assert_eq!(found(&tied, &both, false), (8, 0, vec![]));
        let shared: Vec<String> = tied.iter().cloned().chain(["shared.weight".into()]).collect();
        assert_eq!((found(&head, &shared, true).0, found(&head, &shared, true).1), (8, 1));
        assert_eq!(found(&head, &shared, false).0, 7);
        // Two tables that train apart need a tensor each.
        assert_eq!(found(&both, &tied, false).0, 8);
    }

    #[test]
    fn what_fits_in_two_ways_is_not_renamed() {
        let plan = model("", "model.", None);
        let one = ["norm.weight".to_owned()];
        assert_eq!(found(&plan, &one, false), (0, 0, vec![]));
        let layer = ["q.weight", "up.weight"].map(str::to_owned);
        assert_eq!(found(&plan, &layer, false), (0, 0, vec![]));
        // Another module is not another prefix, nor another name of a table.
        let adapter = ["A", "B"].map(|m| format!("model.layers.0.q.lora_{m}.weight"));
        let adapted: Vec<String> = plan.iter().cloned().chain(adapter.clone()).collect();
        let wrapped =
            |module: &str| adapter.clone().map(|n| format!("base.{n}").replace(".q.", module));
        assert_eq!(found(&adapted, &wrapped(".q."), false).0, 2);
        assert_eq!(found(&adapted, &wrapped(".k."), false), (0, 0, vec![]));
        let other: Vec<String> =
            plan.iter().map(|n| n.replace("layers.0.q", "layers.0.k")).collect();
        assert_eq!(found(&plan, &other, false), (7, 0, vec![]));
        assert_eq!(found(&plan, &[], false), (0, 0, vec![]));
    }
}
