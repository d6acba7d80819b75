//! The macro that generates, from one declaration per key, the section types, the table of keys, and conversions between both.

/// Declares sections of keys, each as `name: type = default => kind`. The default is TOML, the doc comment is the key's
/// help, and the kind is that of the type if it is left out. `tables` are lists of tables, which have no key.
macro_rules! declare {
    ($($(#[doc = $about:literal])* $head:ident: $section:ident {
        $($(#[doc = $doc:literal])* $name:ident: $ty:ty = $default:expr $(=> $kind:expr)?,)*
    } $(, tables { $($(#[$meta:meta])* $table:ident: $row:ty,)* })?)*) => {
        $(
            $(#[doc = $about])*
            #[derive(Clone, Debug, PartialEq)]
            pub struct $section {
                $($(#[doc = $doc])* pub $name: $ty,)*
                $($($(#[$meta])* pub $table: Vec<$row>,)*)?
            }
        )*

        /// A whole configuration.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $($(#[doc = $about])* pub $head: $section,)*
            /// Warnings of settings that were written and have no effect.
            pub unused: Vec<Diagnostic>,
        }

        /// Every key, in the order in which it is printed.
        pub const KEYS: &[Key] = &[$($(Key {
            name: concat!(stringify!($head), ".", stringify!($name)),
            kind: declare!(@kind $ty $(, $kind)?),
            default: stringify!($default),
            doc: concat!($($doc),*),
        },)*)*];

        /// The typed sections of the values of all keys, without tables; `None` if a value is missing or of another type.
        pub(super) fn typed(values: &Values) -> Option<Config> {
            Some(Config {
                $($head: $section {
                    $($name: {
                        let value = values.get(concat!(stringify!($head), ".", stringify!($name)))?;
                        <$ty as Field>::get(value)?
                    },)*
                    $($($table: Vec::new(),)*)?
                },)*
                unused: Vec::new(),
            })
        }

        /// The values of all keys.
        pub(super) fn values(config: &Config) -> Values {
            Values::from([$($((
                concat!(stringify!($head), ".", stringify!($name)),
                config.$head.$name.put(),
            ),)*)*])
        }
    };
    (@kind $ty:ty) => { <$ty as Field>::KIND };
    (@kind $ty:ty, $kind:expr) => { $kind };
}

pub(super) use declare;
