//! Parameter groups: parameters with their own learning rate or weight decay.

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
}

/// All groups. The settings of a later group take precedence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamGroups {
    /// Whether parameters of at most one axis (norms and biases) are not decayed, unless a group says so.
    pub only_matrices_decay: bool,
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
    /// The settings of the parameter of this name and rank.
    pub(super) fn of(&self, name: &str, rank: usize) -> Settings {
        let mut settings = Settings::default();
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
        ParamGroup { scope: scope.into(), lr, weight_decay }
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
        };
        let of = |name, rank| {
            let found = groups.of(name, rank);
            (found.lr.map(|x| x.1), found.weight_decay.map(|x| x.1))
        };
        assert_eq!(of("wte", 2), (None, None));
        assert_eq!(of("ln.weight", 1), (None, Some(0.0)));
        assert_eq!(of("h.0.weight", 2), (Some(0.5), None));
        assert_eq!(of("h.0.bias", 1), (Some(0.5), Some(0.25)));
        assert_eq!(of("h.1.bias", 1), (Some(0.125), Some(0.0)));
        let key = groups.of("h.1.bias", 1).lr.map(|x| x.0);
        assert_eq!(key.as_deref(), Some("optimizer.group.2.lr"));
    }
}
