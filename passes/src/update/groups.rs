//! Parameter groups: parameters with their own learning rate, weight decay, or optimizer.

use frit_ir::ops::OptimizerKind;
use frit_ir::pattern;

/// Settings for the parameters that a pattern covers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamGroup {
    /// Pattern of the parameter's name, or of the scope that holds it.
    pub scope: String,
    /// Base learning rate.
    pub lr: Option<f64>,
    /// Weight decay.
    pub weight_decay: Option<f64>,
    /// With `muon`, which of its two optimizers.
    pub kind: Option<OptimizerKind>,
}

/// All groups. The settings of a later group take precedence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamGroups {
    /// Whether parameters of at most one axis (norms and biases) are not decayed, unless a group says so.
    pub only_matrices_decay: bool,
    /// With `muon`, learning rate and weight decay of the parameters that AdamW steps; those of all if absent.
    pub adamw_lr: Option<f64>,
    /// See `adamw_lr`.
    pub adamw_weight_decay: Option<f64>,
    /// The groups.
    pub groups: Vec<ParamGroup>,
}

/// A value under the key by which it can be changed when the plan is run.
pub(super) type Keyed = Option<(String, f64)>;

/// The settings of one parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Settings {
    pub(super) lr: Keyed,
    pub(super) weight_decay: Keyed,
}

impl ParamGroups {
    /// The settings of the parameter of this name and rank, which `kind` steps.
    pub(super) fn of(&self, name: &str, rank: usize, kind: OptimizerKind) -> Settings {
        let mut settings = Settings::default();
        if kind == OptimizerKind::Adamw {
            let keyed = |key: &str, x: Option<f64>| Some((format!("optimizer.{key}"), x?));
            settings.lr = keyed("adamw_lr", self.adamw_lr);
            settings.weight_decay = keyed("adamw_weight_decay", self.adamw_weight_decay);
        }
        if self.only_matrices_decay && rank <= 1 {
            settings.weight_decay = Some(("optimizer.weight_decay_of_vectors".into(), 0.0));
        }
        for (i, group) in self.groups.iter().enumerate().filter(|(_, g)| g.covers(name)) {
            let keyed = |key: &str, x| (format!("optimizer.group.{i}.{key}"), x);
            if let Some(lr) = group.lr {
                settings.lr = Some(keyed("lr", lr));
            }
            if let Some(decay) = group.weight_decay {
                settings.weight_decay = Some(keyed("weight_decay", decay));
            }
        }
        settings
    }

    /// The optimizer that the last group to say so names for a parameter.
    pub(super) fn kind_of(&self, name: &str) -> Option<OptimizerKind> {
        self.groups.iter().rev().filter(|g| g.covers(name)).find_map(|g| g.kind)
    }
}

impl ParamGroup {
    /// Whether the pattern covers a parameter of this name.
    pub fn covers(&self, name: &str) -> bool {
        let holder = name.rsplit_once('.').map_or("", |(holder, _)| holder);
        pattern::matches(&self.scope, name) || pattern::matches(&self.scope, holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(scope: &str, lr: Option<f64>, weight_decay: Option<f64>) -> ParamGroup {
        ParamGroup { scope: scope.into(), lr, weight_decay, kind: None }
    }

    #[test]
    fn later_groups_win_key_by_key() {
        let groups = ParamGroups {
            only_matrices_decay: true,
            groups: vec![
                group("h.**", Some(0.5), None),
                group("**.bias", None, Some(0.25)),
                group("h.1", Some(0.125), Some(0.0)),
            ],
            ..ParamGroups::default()
        };
        let of = |name, rank| {
            let found = groups.of(name, rank, OptimizerKind::Sgd);
            (found.lr.map(|x| x.1), found.weight_decay.map(|x| x.1))
        };
        assert_eq!(of("wte", 2), (None, None));
        assert_eq!(of("ln.weight", 1), (None, Some(0.0)));
        assert_eq!(of("h.0.weight", 2), (Some(0.5), None));
        assert_eq!(of("h.0.bias", 1), (Some(0.5), Some(0.25)));
        assert_eq!(of("h.1.bias", 1), (Some(0.125), Some(0.0)));
        let key = groups.of("h.1.bias", 1, OptimizerKind::Sgd).lr.map(|x| x.0);
        assert_eq!(key.as_deref(), Some("optimizer.group.2.lr"));
    }

    #[test]
    fn what_adamw_steps_beside_muon_has_settings_of_its_own() {
        let kind = |scope: &str, kind| ParamGroup { kind: Some(kind), ..group(scope, None, None) };
        let groups = ParamGroups {
            adamw_lr: Some(0.25),
            groups: vec![
                kind("**.weight", OptimizerKind::Adamw),
                kind("h.**", OptimizerKind::Muon),
                group("h.0", None, Some(0.5)),
            ],
            ..ParamGroups::default()
        };
        assert_eq!(groups.kind_of("h.0.weight"), Some(OptimizerKind::Muon));
        assert_eq!(groups.kind_of("head.weight"), Some(OptimizerKind::Adamw));
        assert_eq!(groups.kind_of("head.bias"), None);
        let lr = |kind| groups.of("wte", 2, kind).lr;
        assert_eq!(lr(OptimizerKind::Adamw), Some(("optimizer.adamw_lr".into(), 0.25)));
        assert_eq!(lr(OptimizerKind::Muon), None);
        assert_eq!(groups.of("wte", 2, OptimizerKind::Adamw).weight_decay, None);
    }
}
