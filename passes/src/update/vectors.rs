//! Warnings about norms and biases, the parameters of at most one axis: that groups exclude only some of them from weight decay, and that
//! nothing else trains. Both come of choosing parameters by parts of their names.

use super::Update;
use frit_ir::ops::ParamKind;
use frit_ir::{Code, Diagnostic, Graph, ValueId, counted};

/// Names in a note, at most.
const NAMED: usize = 4;

impl Update {
    /// The warnings about trained parameters.
    pub(super) fn about_vectors(
        &self,
        graph: &Graph,
        trained: &[(String, ValueId)],
    ) -> Vec<Diagnostic> {
        let rank = |value: ValueId| graph.ty(value).shape.rank();
        let vectors: Vec<&str> =
            trained.iter().filter(|(_, v)| rank(*v) <= 1).map(|(name, _)| name.as_str()).collect();
        let matrices: Vec<&str> =
            trained.iter().filter(|(_, v)| rank(*v) > 1).map(|(name, _)| name.as_str()).collect();
        let elements: usize = trained.iter().map(|(_, v)| graph.ty(*v).shape.numel()).sum();
        let frozen = graph.params().filter(|(v, p)| p.kind == ParamKind::Frozen && rank(*v) > 1);
        let frozen = frozen.count();
        let only =
            (matrices.is_empty() && frozen > 0).then(|| only_vectors(&vectors, elements, frozen));
        self.partly_decayed(&vectors, &matrices).into_iter().chain(only).collect()
    }

    /// Groups without decay that cover some vectors, and no matrix, while other vectors decay.
    fn partly_decayed(&self, vectors: &[&str], matrices: &[&str]) -> Option<Diagnostic> {
        let default = self.hypers.get("optimizer.weight_decay").copied().unwrap_or(0.0);
        let groups = &self.groups;
        let excludes = |g: &&super::ParamGroup| {
            g.weight_decay == Some(0.0)
                && vectors.iter().any(|name| g.covers(name))
                && !matrices.iter().any(|name| g.covers(name))
        };
        let excluding = groups.groups.iter().find(excludes)?;
        let decays = |name: &&&str| {
            let own = groups.of(name, 1, self.optimizer).weight_decay;
            own.map_or(default, |(_, x)| x) > 0.0
        };
        let decayed: Vec<&str> = vectors.iter().filter(decays).copied().collect();
        if decayed.is_empty() {
            return None;
        }
        let message = format!(
            "the group of scope {} excludes norms or biases from weight decay, and {} of them still decay: {}",
            excluding.scope,
            decayed.len(),
            named(&decayed)
        );
        let help = "set optimizer.decay = \"matrices\", which goes by the number of axes, or give these a group of their own";
        Some(Diagnostic::warning(Code::DecayPartly, message).help(help))
    }
}

fn only_vectors(vectors: &[&str], elements: usize, frozen: usize) -> Diagnostic {
    let message = format!(
        "only norms and biases train, {} in {} ({}); all {frozen} matrices are frozen",
        counted(elements, "element"),
        counted(vectors.len(), "parameter"),
        named(vectors)
    );
    let help = "if more should train, check params.trainable and params.frozen: `**` in a pattern matches any number of names";
    Diagnostic::warning(Code::MatricesFrozen, message).help(help)
}

fn named(names: &[&str]) -> String {
    let mut text: Vec<String> = names.iter().take(NAMED).map(|name| format!("`{name}`")).collect();
    if names.len() > NAMED {
        text.push("…".into());
    }
    text.join(", ")
}
