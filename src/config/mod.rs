//! The configuration file: its sections, their defaults, and its checks. The only folder that knows
//! YAML; it is read and written here.

mod diagnostics;
mod environment;
mod filter;
mod machine;
mod optimizer;
mod resolve;
mod sampling;
mod sections;
mod training;

pub use diagnostics::DiagnosticsConfig;
pub use environment::*;
pub use filter::FilterConfig;
pub use machine::{DeviceName, Threads};
pub use optimizer::*;
pub use sampling::*;
use sections::number_or;
pub use sections::*;
pub use training::*;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result, nearest};

impl Config {
    /// Reads a file, applies overrides `key.path=value`, and resolves relative paths: those of the
    /// file against its own folder, those of overrides against the current one.
    ///
    /// # Errors
    /// If the file cannot be read or parsed, or a key is unknown.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::config(path.display().to_string(), format!("cannot be read: {error}"))
        })?;
        let file = std::path::absolute(path).map_err(Error::io("find", path))?;
        let folder = file.parent().unwrap_or(Path::new("/"));
        Self::parse(&text, &path.display().to_string(), folder, overrides)
    }

    /// The same from text; `place` names it in messages.
    ///
    /// # Errors
    /// If the text does not parse, or a key is unknown.
    pub fn parse(text: &str, place: &str, folder: &Path, overrides: &[String]) -> Result<Self> {
        let mut config = if text.trim().is_empty() {
            Self::default()
        } else {
            // Straight from the text first: its errors then name a line.
            let yaml = serde_yaml::Deserializer::from_str(text);
            serde_path_to_error::deserialize::<_, Self>(yaml)
                .map_err(|error| parse_error(place, error))?
        };
        config.map_paths(|path| folder.join(path));
        if overrides.is_empty() {
            return Ok(config);
        }
        let current = std::env::current_dir().map_err(Error::io("find", Path::new(".")))?;
        for text in overrides {
            config = config.with_override(text, &current)?;
        }
        Ok(config)
    }

    fn with_override(&self, text: &str, current: &Path) -> Result<Self> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Error::config("--set", format!("expected key=value, found `{text}`")))?;
        let place = format!("--set {key}");
        let internal = |error: serde_yaml::Error| Error::config(place.as_str(), error.to_string());
        let mut value: serde_yaml::Value = serde_yaml::from_str(value).map_err(internal)?;
        if PATH_KEYS.contains(&key) {
            absolute(&mut value, current);
        }
        let mut whole = serde_yaml::to_value(self).map_err(internal)?;
        fill_section(&mut whole, key).map_err(internal)?;
        let mut slot = &mut whole;
        for (depth, part) in key.split('.').enumerate() {
            let mapping = match slot {
                serde_yaml::Value::Mapping(mapping) => mapping,
                _ => {
                    let parent: Vec<&str> = key.split('.').take(depth).collect();
                    return Err(Error::config(
                        place,
                        format!("`{}` holds no keys", parent.join(".")),
                    ));
                }
            };
            if !mapping.contains_key(part) {
                let known: Vec<&str> = mapping.keys().filter_map(|key| key.as_str()).collect();
                return Err(Error::config(place, unknown_key(part, &known)));
            }
            slot = &mut mapping[part];
        }
        *slot = value;
        serde_path_to_error::deserialize(whole).map_err(|error| parse_error(&place, error))
    }

    fn map_paths(&mut self, map: impl Fn(&Path) -> PathBuf) {
        match &mut self.policy.checkpoint {
            Some(Checkpoints::One(path)) => *path = map(path),
            Some(Checkpoints::List(paths)) => {
                paths.iter_mut().for_each(|path| *path = map(path));
            }
            None => {}
        }
        for path in [
            &mut self.policy.reference,
            &mut self.rollouts.path,
            &mut self.rollouts.tokenizer,
            &mut self.diagnostics.baseline,
            &mut self.diagnostics.state,
        ]
        .into_iter()
        .flatten()
        .chain(self.sampling.iter_mut().flat_map(|sampling| &mut sampling.tokenizer))
        .chain(self.critic.iter_mut().flat_map(|critic| &mut critic.checkpoint))
        .chain(self.environment.iter_mut().filter_map(EnvironmentConfig::tasks_file_mut))
        .chain(
            self.validation
                .iter_mut()
                .filter_map(|validation| validation.environment.as_mut()?.tasks_file_mut()),
        ) {
            *path = map(path);
        }
    }

    /// The files that it names to be read. A pattern with `{step}` is none, and `diagnostics.state` is
    /// written too.
    pub fn files_read(&self) -> Vec<&Path> {
        let checkpoints = match &self.policy.checkpoint {
            Some(Checkpoints::One(path)) => std::slice::from_ref(path),
            Some(Checkpoints::List(paths)) => paths,
            None => &[],
        };
        let others = [
            &self.policy.reference,
            &self.rollouts.path,
            &self.rollouts.tokenizer,
            &self.diagnostics.baseline,
        ];
        let of_training = [
            self.sampling.as_ref().and_then(|sampling| sampling.tokenizer.as_deref()),
            self.critic.as_ref().and_then(|critic| critic.checkpoint.as_deref()),
            self.environment.as_ref().and_then(EnvironmentConfig::tasks_file),
            self.validation.as_ref().and_then(|validation| {
                validation.environment.as_ref().and_then(EnvironmentConfig::tasks_file)
            }),
        ];
        let files = checkpoints.iter().chain(others.into_iter().flatten()).map(PathBuf::as_path);
        files.chain(of_training.into_iter().flatten()).collect()
    }

    /// The keys of the configuration whose values differ from those of one that was written as YAML.
    ///
    /// # Errors
    /// If that is no YAML.
    pub fn differences(&self, earlier: &str) -> Result<Vec<String>> {
        let problem = |error: serde_yaml::Error| Error::config("resolved", error.to_string());
        let now = serde_yaml::to_value(self).map_err(problem)?;
        let earlier: serde_yaml::Value = serde_yaml::from_str(earlier).map_err(problem)?;
        let mut keys = Vec::new();
        compare("", &earlier, &now, &mut keys);
        Ok(keys)
    }

    /// The configuration as YAML.
    ///
    /// # Errors
    /// If a value cannot be written as YAML.
    pub fn to_yaml(&self) -> Result<String> {
        serde_yaml::to_string(self).map_err(|error| Error::config("resolved", error.to_string()))
    }
}

/// Adds the dotted keys under which two values differ.
fn compare(key: &str, left: &serde_yaml::Value, right: &serde_yaml::Value, keys: &mut Vec<String>) {
    let (serde_yaml::Value::Mapping(left), serde_yaml::Value::Mapping(right)) = (left, right)
    else {
        if left != right {
            keys.push(key.to_owned());
        }
        return;
    };
    let new = right.keys().filter(|name| !left.contains_key(*name));
    for name in left.keys().chain(new) {
        let below = name.as_str().unwrap_or_default();
        let below = if key.is_empty() { below.to_owned() } else { format!("{key}.{below}") };
        let null = serde_yaml::Value::Null;
        let of = |mapping: &serde_yaml::Mapping| mapping.get(name).unwrap_or(&null).clone();
        compare(&below, &of(left), &of(right), keys);
    }
}

/// Keys whose values are paths.
const PATH_KEYS: [&str; 12] = [
    "policy.checkpoint",
    "policy.reference",
    "rollouts.path",
    "rollouts.tokenizer",
    "diagnostics.baseline",
    "diagnostics.state",
    "sampling.tokenizer",
    "critic.checkpoint",
    "environment.path",
    "environment.tasks",
    "validation.environment.path",
    "validation.environment.tasks",
];

/// Puts the defaults of a section of training in its place if an override names one that the file has
/// not.
fn fill_section(whole: &mut serde_yaml::Value, key: &str) -> serde_yaml::Result<()> {
    let section = key.split('.').next().unwrap_or_default();
    if whole.get(section).is_some() {
        return Ok(());
    }
    let TrainSections { sampling, training, optimizer, critic, validation, checkpoint, .. } =
        TrainSections::default();
    let value = match section {
        "sampling" => serde_yaml::to_value(sampling)?,
        "training" => serde_yaml::to_value(training)?,
        "optimizer" => serde_yaml::to_value(optimizer)?,
        "critic" => serde_yaml::to_value(critic)?,
        "validation" => serde_yaml::to_value(validation)?,
        "checkpoint" => serde_yaml::to_value(checkpoint)?,
        "early_stop" => serde_yaml::to_value(EarlyStopConfig::default())?,
        "environment" => serde_yaml::Value::Null,
        _ => return Ok(()),
    };
    whole[section] = value;
    Ok(())
}

fn absolute(value: &mut serde_yaml::Value, folder: &Path) {
    match value {
        serde_yaml::Value::String(path) => {
            *path = folder.join(path.as_str()).to_string_lossy().into_owned();
        }
        serde_yaml::Value::Sequence(paths) => {
            paths.iter_mut().for_each(|path| absolute(path, folder));
        }
        _ => {}
    }
}

fn unknown_key(key: &str, known: &[&str]) -> String {
    match nearest(key, known.iter().copied()) {
        Some(nearest) => format!("unknown key `{key}`; did you mean `{nearest}`?"),
        None => format!("unknown key `{key}`; known are {}", known.join(", ")),
    }
}

/// serde's message with the dotted key, and the nearest known name where one is unknown.
fn parse_error(place: &str, error: serde_path_to_error::Error<serde_yaml::Error>) -> Error {
    let key = error.path().to_string();
    let message = error.into_inner().to_string();
    // serde_yaml repeats the path in front.
    let message = message.strip_prefix(&format!("{key}: ")).unwrap_or(&message).to_owned();
    let place = if key == "." || place.ends_with(&format!(" {key}")) {
        place.to_owned()
    } else {
        format!("{place}: {key}")
    };
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let is_unknown = message.contains("unknown field") || message.contains("unknown variant");
    match names.split_first() {
        Some((unknown, known)) if is_unknown => {
            let location = message.rfind(" at line ").map_or("", |at| &message[at..]);
            let what = if message.contains("unknown field") {
                unknown_key(unknown, known)
            } else {
                format!("expected one of {}, found `{unknown}`", known.join(", "))
            };
            Error::config(place, format!("{what}{location}"))
        }
        _ => Error::config(place, message),
    }
}
