//! One trajectory in an environment: responses in, messages and rewards out.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Answers, Environment, Outcome, Seed, Tags, error};
use crate::error::Result;

/// What holds in every environment. The defaults are RAGEN's. Its versions differ: earlier ones read 5
/// actions of a response, later ones charge for every invalid action instead of once a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    /// The form of a response.
    pub tags: Tags,
    /// What parts the actions of a sequence.
    pub separator: String,
    /// Subtracted from the return for every turn whose response has not the form, or holds an invalid
    /// action, or none.
    pub format_penalty: f64,
    /// Responses of a trajectory.
    pub max_turns: usize,
    /// Actions of a trajectory; none: as many as [`Environment::max_actions`] says.
    pub max_actions: Option<usize>,
    /// Actions of a response; further ones are not read.
    pub max_actions_per_turn: usize,
    /// What is said around an observation.
    pub message: MessageStyle,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            tags: Tags::ThinkAnswer,
            separator: "||".into(),
            format_penalty: 0.1,
            max_turns: 5,
            max_actions: None,
            max_actions_per_turn: 2,
            message: MessageStyle::Full,
        }
    }
}

/// What is said around an observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageStyle {
    /// The instruction at first; then turn, reward, actions that are left, and the form of an answer.
    #[default]
    Full,
    /// The observation alone, for small policies made for one environment.
    Bare,
}

/// One response and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The response as it came.
    pub response: String,
    /// Its bytes that hold the reasoning, if the form has any and was kept.
    pub reasoning: Option<Range<usize>>,
    /// Whether the response has the form that was asked for.
    pub well_formed: bool,
    /// The actions that were taken.
    pub actions: Vec<String>,
    /// How many of them were effective.
    pub effective: usize,
    /// How many were refused.
    pub invalid: usize,
    /// What the environment gave.
    pub reward: f64,
    /// What is taken from that for the form.
    pub penalty: f64,
}

/// Why a trajectory is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The environment said so.
    Done,
    /// No action was left.
    ActionLimit,
    /// No turn was left.
    TurnLimit,
}

/// A trajectory in the making.
pub struct Episode {
    environment: Box<dyn Environment>,
    rules: Rules,
    turns: Vec<Turn>,
    actions_left: usize,
    success: bool,
    end: Option<End>,
}

impl Episode {
    /// Begins a trajectory.
    ///
    /// # Errors
    /// If the rules allow nothing, or the environment has no task.
    pub fn start(mut environment: Box<dyn Environment>, rules: Rules, seed: Seed) -> Result<Self> {
        rules.check(environment.name())?;
        environment.reset(seed)?;
        let actions_left = rules.max_actions.unwrap_or_else(|| environment.max_actions()).max(1);
        Ok(Self { environment, rules, turns: Vec::new(), actions_left, success: false, end: None })
    }

    /// What the policy reads now: the first message is the prompt, later ones follow its responses.
    pub fn message(&self) -> String {
        let state = self.environment.observe();
        if self.rules.message == MessageStyle::Bare {
            return state;
        }
        let before = match self.turns.last() {
            None => self.instruction(),
            Some(turn) => format!("Reward: {:?}", turn.reward),
        };
        let number = self.turns.len() + 1;
        format!("{before}\n\nTurn {number}\nState:\n{state}\n{}\n", self.limits())
    }

    /// Takes a response: reads the answer, lets the environment act, and counts.
    ///
    /// # Errors
    /// If the trajectory is over, or the environment fails; what it did until then is not counted.
    pub fn respond(&mut self, response: &str) -> Result<&Turn> {
        if let Some(end) = self.end {
            return Err(error(
                self.environment.name(),
                format!("expected no response after the end of a trajectory ({end:?})"),
            ));
        }
        let answer = self.rules.tags.parse(response);
        let (actions, invalid) = self.actions(answer.as_ref().map_or("", |answer| &answer.text));
        let mut turn = Turn {
            response: response.to_owned(),
            well_formed: answer.is_some(),
            reasoning: answer.and_then(|answer| answer.reasoning),
            actions: Vec::new(),
            effective: 0,
            invalid,
            reward: 0.0,
            penalty: 0.0,
        };
        let mut last = None;
        for action in actions {
            let Some(outcome) = self.environment.act(&action)? else {
                turn.invalid += 1;
                continue;
            };
            turn.reward += outcome.reward;
            turn.effective += usize::from(outcome.effective);
            turn.actions.push(action);
            last = Some(outcome);
            if outcome.done || turn.actions.len() == self.actions_left {
                break;
            }
        }
        if turn.invalid > 0 || turn.actions.is_empty() {
            turn.penalty = self.rules.format_penalty;
        }
        self.actions_left -= turn.actions.len();
        self.turns.push(turn);
        self.close(last);
        Ok(&self.turns[self.turns.len() - 1])
    }

    fn close(&mut self, last: Option<Outcome>) {
        self.success |= last.is_some_and(|last| last.success);
        self.end = if last.is_some_and(|last| last.done) {
            Some(End::Done)
        } else if self.actions_left == 0 {
            Some(End::ActionLimit)
        } else if self.turns.len() == self.rules.max_turns {
            Some(End::TurnLimit)
        } else {
            None
        };
    }

    /// The actions of an answer, and how many parts of it are none. As in RAGEN, a part that names no
    /// action counts wherever it stands, and the others are taken all the same.
    fn actions(&self, answer: &str) -> (Vec<String>, usize) {
        let Answers::Sequence(names) = self.environment.answers() else {
            let whole = Some(answer).filter(|answer| !answer.is_empty());
            return (whole.into_iter().map(str::to_owned).collect(), 0);
        };
        let parts = answer.split(&self.rules.separator).map(str::trim);
        let parts: Vec<&str> =
            parts.filter(|part| !part.is_empty()).take(self.rules.max_actions_per_turn).collect();
        let named = |part: &&str| {
            names.iter().find(|name| name.to_lowercase() == part.to_lowercase()).cloned()
        };
        let actions: Vec<String> = parts.iter().filter_map(named).collect();
        let invalid = parts.len() - actions.len();
        (actions, invalid)
    }

    fn instruction(&self) -> String {
        let instruction = self.environment.instruction();
        match self.environment.answers() {
            Answers::Sequence(names) => format!(
                "{instruction}\nActions: {}. At most {} at once, joined by \"{}\".",
                names.join(", "),
                self.rules.max_actions_per_turn,
                self.rules.separator
            ),
            Answers::Text | Answers::Name => instruction,
        }
    }

    fn limits(&self) -> String {
        let left = match self.actions_left {
            1 => "1 action left.".to_owned(),
            count => format!("{count} actions left."),
        };
        match self.rules.tags {
            Tags::None => left,
            tags => format!("{left} Answer as {} and write nothing else.", tags.form()),
        }
    }

    /// Why it is over; none while it is not.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Whether the goal was reached.
    pub fn success(&self) -> bool {
        self.success
    }

    /// The turns so far.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// The return so far: rewards less penalties, summed over turns.
    pub fn total_reward(&self) -> f64 {
        self.turns.iter().map(|turn| turn.reward - turn.penalty).sum()
    }

    /// Actions that were refused so far.
    pub fn invalid_actions(&self) -> usize {
        self.turns.iter().map(|turn| turn.invalid).sum()
    }

    /// Responses so far that had not the form.
    pub fn malformed(&self) -> usize {
        self.turns.iter().filter(|turn| !turn.well_formed).count()
    }
}

impl Rules {
    /// Checks every number; `name` is the environment's, for the message.
    ///
    /// # Errors
    /// If they allow nothing, or the penalty is none.
    pub fn check(&self, name: &str) -> Result<()> {
        for (what, count) in [
            ("max_turns", self.max_turns),
            ("max_actions", self.max_actions.unwrap_or(1)),
            ("max_actions_per_turn", self.max_actions_per_turn),
        ] {
            if count == 0 {
                return Err(error(name, format!("{what}: expected at least 1, found 0")));
            }
        }
        if self.separator.trim().is_empty() {
            return Err(error(name, "separator: expected some sign, found white space"));
        }
        if !(self.format_penalty >= 0.0 && self.format_penalty.is_finite()) {
            return Err(error(
                name,
                format!(
                    "format_penalty: expected a finite number of at least 0, which is subtracted, found {}",
                    self.format_penalty
                ),
            ));
        }
        Ok(())
    }
}
