# Composes short stories: a hero, a friend, a world and an arc of five stages, with scenery and talk between them.
# All narration is in the past tense, so that the same sentence serves "Anna", "the fox" and "I".
from __future__ import annotations

import random
from collections.abc import Mapping

from .grammar import Words, Writer, with_article
from .words import ANIMAL_NAMES, BOYS, GENERAL, GIRLS, ROBOT_NAMES, STORY_ANIMALS, WORLDS

OPENINGS = [
    "Once upon a time, {where}, there lived {desc} [named|called] {name}.",
    "Once upon a time, there was {desc} [named|called] {name}, who lived {where}.",
    "Once upon a time, {desc} named {name} lived {where}.",
    "Once upon a time there was {a:kind} {noun} whose name was {name}. {Name} lived {where}.",
    "Long ago, {where}, there lived {desc} [named|called] {name}.",
    "A long time ago, {desc} called {name} lived {where}.",
    "There was once {desc} called {name}, who lived {where} and loved {hobby}.",
    "There once was {a:kind} {noun} {where}. Everyone called {him} {name}.",
    "{Where}, there lived {desc} [named|called] {name}.",
    "{Where} lived {desc} named {name}.",
    "{Where}, {moment}, {desc} called {name} found out that nothing stays the same for ever.",
    "{Where}, everybody knew {name}. {He} was {a:kind} {noun}, and {he} was never in a hurry.",
    "In a land far away, {where}, there was {desc} called {name}.",
    "{Moment}, {desc} called {name} woke up early. {Sky}.",
    "{Moment}, when {sky}, {desc} named {name} set out for {spot}.",
    "It was {a:grey} {season} day, and {desc} named {name} had nothing to do.",
    "It was {season}, and {sky}. {Where}, {desc} called {name} was waiting.",
    "It was late in {month} when {desc} called {name} came to {spot} for the first time.",
    "It all began {moment}, {where}. {A:kind} {noun} called {name} was on {his} way to {spot}.",
    "Nobody knew where {name} had come from. {He} was {desc} and lived {where}.",
    "{Name} was {a:kind} {noun} who lived {where}.",
    "{Name} was {desc}, and {he} lived {where}.",
    "{Name} had always lived {where}. {He} liked {hobby} more than anything else.",
    "{Name} loved {hobby}. {He} was {desc}, and {his} home was {where}.",
    "Every morning, {desc} named {name} walked to {spot}.",
    "Every {day}, {name} went to {spot}. {He} was {desc}, and {he} liked to be on time.",
    "The people {where} still tell the story of {name}, {desc}.",
    "The day began like any other. {Where}, {desc} named {name} was having {food} for breakfast.",
    "The sun had just come up when {desc} called {name} opened the door.",
    "The wind was strong that {season}. {Where}, {desc} called {name} was looking out of the window.",
    "The {noun} was called {name}, and {he} lived {where}.",
    "The little {noun} had a name, and the name was {name}. {He} lived {where}.",
    "When {sky}, most people stayed at home. {Name}, {desc}, did not.",
    "When {name} was very young, {he} moved to a house {where}.",
    "Many years ago, {where}, {desc} named {name} lived a quiet life.",
    "Far from the noise of the world, {where}, lived {desc} called {name}.",
    "On {a:grey} morning in {month}, {desc} called {name} opened the window. {Sky}.",
    "At the end of {month}, {desc} called {name} came home, {where}.",
    "Have you heard of {name}? {He} was {desc}, and {he} lived {where}.",
    "This is the story of {name}, {desc} who lived {where}.",
    "This story begins {where}. {Desc} named {name} lived there with {his} {family}.",
    "Some people are born brave. {Name}, {desc}, was not one of them.",
    "Deep inside, {name} had always been {mood}. {He} was {desc} and lived {where}.",
    "Last {season}, {desc} called {name} came to stay {where}.",
    "Yesterday, {where}, {desc} called {name} had a very unusual day.",
    "As {sky}, {desc} called {name} walked towards {spot}.",
    "Not far from {spot}, {where}, lived {desc} named {name}.",
    '"Good morning!" said {name}. {He} was {desc}, and {he} said it to everyone {where}.',
    '"Something is going to happen today," said {name}, {desc}, to {his} {family}. {Sky}.',
]
NAMELESS_OPENINGS = [
    "Once upon a time, {where}, there lived {desc}.",
    "Once upon a time, there was {desc} who lived {where}.",
    "There was once {desc} who lived {where} and loved {hobby}.",
    "{Where}, there lived {desc} without a name.",
    "A {noun} once lived {where}. Nobody had ever given {him} a name.",
    "The {noun} woke up early. {Sky}.",
    "The {noun} opened one eye and then the other. It was {a:grey} morning, and {sky}.",
    "The {noun} lived {where}. {He} was {kind}, and {he} was fond of {hobby}.",
    "The {noun} was sitting near {spot} and waiting for {season}.",
    "The {noun} had a secret. Nobody {where} knew it.",
    "When the {noun} came to {spot} that day, {sky}.",
    "When the {noun} was young, {he} lived {where}.",
    "When the {noun} opened the door, {sky}.",
    "One day, the {noun} went to {spot}. {Sky}.",
    "It was raining, and the {noun} had nothing to do.",
    "It was getting dark when the {noun} came home to {spot}.",
]
SELF_OPENINGS = [
    "I was {number} years old when this happened. We lived {where}.",
    "I grew up {where}. My {family} was {a:job}, and I wanted to be one too.",
    "I remember {a:grey} day in {month}. I was living {where}.",
    "I still remember the {season} when everything changed. I lived {where} then.",
    "I have never told anyone this story. It happened {where}, {moment}.",
    "I woke up early that {day}. {Sky}.",
    "I had been {a:job} for {number} years when it happened.",
    "I am {a:job}, and I live {where}. This is what happened to me last {season}.",
    "I did not want to go to {spot} that day, but my {family} asked me to.",
    "My {family} always said that I was {mood}. That {season}, {where}, I found out why.",
    "My name is {alias}, and I am {a:job}. I work {where}.",
    "My first day {where} was {a:grey} one.",
    "My {family} and I lived {where}, in a house with {a:colour} door.",
    "When I was a child, we lived {where}.",
    "When I was young, I spent every {season} {where}.",
    "We lived {where} in those days, my {family} and I.",
    "Last {season} I visited my {family}, who lives {where}.",
    "Every {season} I go back to the place where I grew up. It was there, {where}, that this happened.",
    "It was {a:grey} morning, and I was on my way to {spot}.",
    "The first time I saw {spot}, I was {number} years old.",
    "On {day}, I took my {family}'s old bicycle and rode to {spot}.",
    "Yesterday I found an old photograph. It was taken {where}, many years ago.",
    "Once, when I was small, I got lost {where}.",
    "If you ever come to {spot}, ask for me. Everyone there knows my story.",
]
MACHINE_OPENINGS = [
    "The {machine} had been silent for {timespan}.",
    "The {machine} stopped {moment}, and nobody knew why.",
    "The {machine} coughed, shook and stopped.",
    "The {machine} was older than anyone {where}.",
    "The {machine} hummed softly, as it did every morning.",
    "The {machine} made a strange noise.",
    "The old {machine} had worked for {number} years without a rest.",
    "The {machine} began to rattle {moment}.",
    "The {machine} would not start. It was {a:grey} morning in {month}.",
    "The {machine} was loud, but everyone loved it.",
    "The great {machine} turned slowly, and then it stood still.",
    "The {machine} ran day and night, and people {where} had stopped hearing it.",
    "{Moment}, the {machine} stopped.",
    "There was a loud bang, and the {machine} stood still.",
    "Nobody {where} could remember a day without the {machine}.",
    "Clank, clank, clank went the {machine}, and then it went quiet.",
]
MACHINE_HEROES = [
    "{Name}, {desc}, put down {his} cup and listened.",
    "{Desc} called {name} was the first to notice.",
    "That was bad news for {name}, {desc} who lived {where}.",
    "{Name} was {desc}, and {he} knew the {machine} better than anyone.",
    "It belonged to {name}, {desc}, who had looked after it for {timespan}.",
    "{Name}, {desc}, came running from {spot}.",
    'Only {name}, {desc}, was not worried. "I will have a look," {he} said.',
]
DETAILS = [
    "{Sight}",
    "{Sight}",
    "{Sight}",
    "{N} liked {hobby}, and {he} was good at it.",
    "[{His} best friend was {f}, {fdesc}|A friend of {his}, {f}, lived near {spot}].",
    "{N} was {mood} that day.",
    "{N} had {a:adj} house with {a:colour} door.",
    "In {his} pocket {n} always had {a:adj} key and a piece of string.",
    "Most of all, {n} loved the smell of {food}.",
    "{N} did not have much, but {he} had enough.",
    "Every evening {n} had {food} and looked out of the window.",
    "{N} knew every corner of {spot}.",
    "It was a good life, but sometimes {n} felt {mood}.",
    "In {season}, when {sky}, {n} often walked to {spot}.",
    "People said that {n} was {kind}, and it was true.",
    "{N} was not rich, and {he} was not famous, but {he} was {kind}.",
    "The days were long, and nothing much ever happened.",
    "Above the door hung {a:adj} bell made of {material}.",
]
SCENERY = [
    "{Sight}",
    "{Sight}",
    "{Sight}",
    "{Sky}.",
    "By then, {sky}.",
    "For a moment everything was still.",
    "{N} stopped and listened. {Sight}",
    "Around {him}, {sight2}",
    "It was {grey} outside.",
    "The road to {spot} was long and {adj}.",
    "Somewhere a door closed.",
    "{N} took a deep breath.",
    "{N} had {food}, and that helped a little.",
    "Time passed. {Sight}",
    "Nothing moved except the clouds.",
    "{N} felt {mood}, but {he} went on.",
    "The sky turned {colour}, and the shadows grew long.",
]
TALK = [
    '"{Remark}," said {f}.',
    '"{Remark}," said {f}, and {fhe} meant it.',
    '"{Remark}," {f} said {slowly}.',
    '"{Question}?" asked {f}. "{Answer}," {n} said.',
    '"{Question}?" {n} asked. "{Answer}," said {f}.',
    '{F} looked at {him}. "{Question}?" {N} thought about it. "{Answer}," {he} said.',
    '{N} smiled. "{Remark}," {he} said.',
    '"{Remark}," {n} whispered. {F} nodded {slowly}.',
    '"{Question}?" asked {f}. {N} did not answer at once.',
    '{F} laughed. "{Remark}," {fhe} said.',
    '"{Remark}," said {f}. "{Remark2}."',
]
REMARKS = {
    "remark": [
        "We should not give up",
        "We will find a way",
        "Everything takes time",
        "It is not far now",
        "I have an idea",
        "You are very {kind}",
        "I was just thinking the same",
        "Two are better than one",
        "It will be all right",
        "Let us have some {country_food} first",
        "Slow is better than never",
        "I have never seen anything like it",
        "My {family} told me about this",
        "There is always another way",
        "You worry too much",
        "Look at the sky",
        "That is a very good question",
        "First we think, and then we act",
        "I am glad that you are here",
        "I would not trade this day for a bag of gold",
        "Listen, something is moving over there",
        "It is only the wind",
        "A little {virtue} goes a long way",
        "Nobody is born knowing everything",
        "I would like to help",
    ],
    "remark2": [
        "Come with me",
        "You will see",
        "Trust me",
        "That is all I know",
        "We have until {later}",
        "Take my hand",
        "It has always been like that",
        "I am sure of it",
        "Do not be afraid",
        "Tomorrow is another day",
        "We can rest at {spot}",
        "I promise",
        "There is no hurry",
    ],
    "question": [
        "Are you sure",
        "What shall we do now",
        "Have you been to {spot}",
        "Why are you so {mood}",
        "Did you hear that",
        "Do you think it will work",
        "Can I come with you",
        "How long will it take",
        "Where did you learn that",
        "What are you looking for",
        "Are you afraid",
        "Do you need help",
        "What would your {family} do",
        "Who told you that",
    ],
    "answer": [
        "I am not sure",
        "Not yet",
        "I think so",
        "Of course",
        "Only a little",
        "Let us find out",
        "I hope so",
        "We have to try",
        "Yes, with all my heart",
        "No, but I will learn",
        "Ask me again tomorrow",
        "I cannot say",
        "That is a long story",
        "A bird told me",
        "More than you know",
    ],
}
# An arc is five stages; each stage offers several ways to tell it. `{thing}` and `{machine}` are fixed in one story.
ARCS: dict[str, list[list[str]]] = {
    "lost": [
        [
            "{Moment}, {n} noticed that {his} {thing} was gone.",
            "Then {his} {thing} disappeared. {N} had left it near {spot}, or so {he} thought.",
            "One day {n} lost {his} {thing}. It was only {a:adj} {thing}, but it had belonged to {his} {family}.",
            "{N} reached into {his} bag. The {thing} was not there.",
            "But that day, something was missing: the {adj} {thing} that {n} had carried for {timespan}.",
        ],
        [
            "{N} looked under the bed, behind the door and in every {box}, but the {thing} was nowhere.",
            "{N} searched the whole house, from the cellar to the roof, and found nothing but dust.",
            "First {n} went to {spot}. There was no sign of the {thing}.",
            "{N} asked {a:job}, and then another one. Nobody had seen {a:thing}.",
            "{N} walked back to {spot}, looking at the ground all the way.",
        ],
        [
            "{F} came by and offered to help. Together they went to {spot2}.",
            'Then {f} had an idea. "When did you see it last?" {fhe} asked. "At {spot2}," said {name}.',
            "At {spot2}, {n} met {f}, {fdesc}. {F} had seen something {colour} in the grass.",
            "{Later}, {f} found a small trail that led to {spot2}.",
            'A child pointed towards {spot2}. "I saw something there," the child said.',
        ],
        [
            "And there it was. The {thing} lay in {a:adj} {box}, just where {n} had put it to keep it safe.",
            "There, under a heap of leaves, lay the {thing}. {N} picked it up {slowly}.",
            "A bird had taken the {thing} to its nest. It gave the {thing} back for a piece of bread.",
            "The {thing} was there, wet and a little dirty, but whole.",
            "{F} pulled the {thing} out from behind {a:adj} {box} and laughed.",
        ],
        [
            "{N} held the {thing} close and went home {mood}.",
            "From then on, {n} always knew where the {thing} was.",
            "{N} thanked {f} with {food}, and they talked until late.",
            "After that, {n} tied {a:colour} ribbon to the {thing}, and it was never lost again.",
            "That night {n} put the {thing} beside {his} bed and slept very well.",
        ],
    ],
    "repair": [
        [
            "Then the {machine} broke. It gave one last groan and stood still.",
            "{Moment}, the {machine} stopped, and nobody could make it go again.",
            "But the {machine} had been making a strange sound for {timespan}, and that day it fell silent.",
            "There was a problem: the {machine} did not work any more.",
            "Without the {machine}, nothing could go on. Everybody looked at {him}.",
        ],
        [
            "{N} opened the {machine} and looked inside. There were wheels, pipes and a great deal of dust.",
            "{N} tried to start it once, and twice, and a third time. It only coughed.",
            "{N} cleaned every part with a soft cloth. Still, the {machine} did not move.",
            "{N} turned the big wheel by hand. It moved a little and got stuck again.",
            "{N} listened to the {machine} with {his} ear against the metal. There was a faint knock inside.",
            "{N} hit it with a hammer, very softly. That did not help at all.",
        ],
        [
            '"It needs oil," said {f}. "Everything old needs a little oil."',
            "{F}, {fdesc}, brought a box of tools and {a:adj} lamp.",
            'Then {f} pointed at a small wheel. "That one is too tired to turn," {fhe} said.',
            "In an old book, {n} found a drawing of the {machine}. One spring was missing.",
            "{F} remembered that there was a spare part at {spot2}, and they went to get it.",
        ],
        [
            "{N} put in the new part, tightened every screw and held {his} breath. The {machine} began to turn.",
            "A tiny stone had been stuck between two wheels. {N} took it out, and the {machine} started to hum.",
            "They worked until {sky2}. Then there was a cough, a puff of smoke, and the {machine} ran again.",
            "A drop of oil here, a new screw there, and {slowly} the {machine} came back to life.",
            "{N} pulled the lever. First nothing happened. Then, with a deep sound, the {machine} woke up.",
        ],
        [
            "Everyone cheered, and {n} wiped {his} hands and smiled.",
            "The {machine} has run ever since, and it is said to run a little better than before.",
            '"It only wanted somebody to listen," said {name}.',
            "Since that day, {n} {has} given the {machine} a drop of oil every {day}.",
            "That evening there was {food} for everyone, and the {machine} hummed along.",
        ],
    ],
    "found": [
        [
            "{Moment}, {n} found {a:adj} {thing} near {spot}.",
            "On the way to {spot}, {n} saw something in the grass. It was {a:thing}.",
            "Behind {spot} stood {a:adj} {box}. Inside it lay {a:thing}.",
            "One day, a stranger left {a:thing} at {his} door and walked away.",
            "Something shone in the dust. {N} bent down and picked up {a:adj} {thing}.",
        ],
        [
            "It was old, and somebody had written a name on it: {owner}.",
            "{N} turned it over and over. It was made of {material}, and it was warm.",
            "{N} wondered who had lost it. Surely somebody was looking for it.",
            "{N} wanted to keep it. But it did not belong to {him}.",
            "There was a small sign on it that {n} could not read.",
        ],
        [
            "So {n} went to {spot2} and asked everyone who passed by.",
            "{F} thought that the {job2} might know more, and so they went to {spot2}.",
            '"It looks like something my {family} once had," said {f}.',
            "{N} wrote a note and put it up at {spot2}.",
            "{N} and {f} walked from door to door until their feet hurt.",
        ],
        [
            "At last an old woman opened her door. When she saw the {thing}, her eyes filled with tears.",
            '{Later}, {a:job} came running. "My {thing}!" he cried. "I thought it was gone for ever."',
            "It turned out that the {thing} belonged to {owner}, who had lost it {number} years ago.",
            "A small boy stood at {spot2} and looked at the ground. The {thing} was his.",
            'The {job2} looked at it for {timespan}. "It was mine when I was young," she said.',
        ],
        [
            "{N} did not ask for anything, but from that day on {he} had one more friend.",
            "As a thank-you, {n} was given {food} and {a:adj} story.",
            "{N} walked home with empty hands and a full heart.",
            "It is good to find a thing, {n} thought, but it is better to give it back.",
            "The two of them had tea together every {day} after that.",
        ],
    ],
    "creature": [
        [
            "{Moment}, {n} heard a small voice near {spot}.",
            "Near {spot}, {n} found a little {critter} that could not walk.",
            "One day a {critter} sat in front of {his} door and would not leave.",
            "{N} heard something crying in the dark. It was a young {critter}.",
            "On the path to {spot} lay a {critter} with a hurt leg.",
        ],
        [
            "It was cold and hungry, and it was very much afraid.",
            "The {critter} looked at {him} with big dark eyes.",
            "{N} did not know much about such animals, but {he} knew what it was like to be alone.",
            "{N} sat down in the grass and waited, so that it would not be scared.",
            "At first it hid under a heap of leaves.",
        ],
        [
            "{N} gave it water and a warm blanket.",
            "{N} carried it home in a basket and called {f} for help.",
            '"It needs rest," said {f}, "and something to eat."',
            "{N} gave it bread, but it wanted berries. So {he} went out to look for berries.",
            "For {timespan}, {n} looked after it and told it stories.",
        ],
        [
            "{Slowly}, the {critter} became strong again. One morning it jumped onto the table.",
            "{Later}, the {critter} could walk, and then run, and then nobody could catch it.",
            "One evening its mother came to {spot} and called. The {critter} lifted its head.",
            "When {season} came, it was time to say goodbye.",
            "Soon the {critter} followed {him} everywhere, even to {spot2}.",
        ],
        [
            "{N} opened the door, and the {critter} ran off. But every {season} it came back to visit.",
            "{N} was sad and glad at the same time.",
            "Since then, {n} {has} never been alone, for the {critter} stayed.",
            "And sometimes, at night, {n} still hear{s} it near {spot}.",
            "{N} called it {petname}, and they were friends for the rest of their lives.",
        ],
    ],
    "journey": [
        [
            "{N} had always wanted to see {spot2}, which was very far away.",
            "{Moment}, {n} decided to go on a journey.",
            'A letter came. It said only: "Come to {spot2} before {season}."',
            "One day {n} packed a bag, took {his} {thing} and left.",
            '"I want to know what is behind the hills," {n} said.',
        ],
        [
            "{N} walked for {timespan}. {Sight}",
            "The first day was easy. On the second day, {sky}.",
            "{N} took the wrong way twice and came back to {spot}.",
            "By night {n} slept under the stars, and by day {he} followed the river.",
            "The road went up and down, and {his} feet began to hurt.",
        ],
        [
            "On the road {n} met {f}, {fdesc}, who was going the same way.",
            'At a crossing sat {f}, {fdesc}. "Left or right?" {n} asked. "It depends on what you are looking for," '
            "said {f}.",
            "{F} shared {food} with {him}, and they went on together.",
            "{Later}, a storm came, and {n} hid in an empty hut. {F} was already there.",
            "{N} was about to turn back when {f} appeared with a lamp.",
        ],
        [
            "And then they stood in front of {spot2}. It was smaller than {n} had thought, and much more beautiful.",
            "At last they reached {spot2}. {Sight}",
            "When the fog lifted, {n} saw {spot2} at last.",
            "There it was: {spot2}. For {timespan}, nobody said a word.",
            "They arrived at {spot2} just as the sun went down.",
        ],
        [
            "{N} stayed for {timespan} and then went home, because home was the best place of all.",
            "On the way back, everything looked new.",
            "The best part of the journey, {n} said later, was the friend at {his} side.",
            "{N} brought back {a:adj} stone, and it still lies on the table.",
            "Since then, {n} {has} known that the world is large and that one can walk through it.",
        ],
    ],
    "contest": [
        [
            "Every year there was a great contest at {spot}. The prize was {a:adj} {thing}.",
            "{Moment}, a sign hung at {spot}: the best {country_food} would win a prize.",
            "There was going to be a race from {spot} to {spot2}, and {n} wanted to win it.",
            "The {job2} announced a contest. Whoever made the most beautiful {thing} would win.",
            "Everyone was talking about the great {instrument} contest.",
        ],
        [
            "{N} practised every day, in sun and in rain.",
            "{N} had never won anything, and {he} was afraid that everyone would laugh.",
            "{N} tried, failed and tried again. {Slowly}, it got better.",
            "On the first try, everything went wrong.",
            "{F} was much better at it, and {n} knew it.",
        ],
        [
            "On the day of the contest, {sky}. {F} was there as well.",
            "The night before, {n} could not sleep.",
            "When the bell rang, everybody began at once.",
            "Just before it started, {f} lost {fhis} tools. {N} shared {his} own with {fhim}.",
            "{N} was in front until {f} fell. Then {he} stopped and helped {fhim} up.",
        ],
        [
            "In the end {n} came third, and {f} came second.",
            "When the names were read out, {n} could not believe it. {He} had won.",
            "{N} did not win, but everyone clapped the longest for {him}.",
            "The judges talked for {timespan}. Then they gave the prize to both of them.",
            "{N} was the very last, but {he} was laughing.",
        ],
        [
            "The prize was nice, but the day was better.",
            "That evening they all had {food} together, winners and losers at one table.",
            '"Next year again," said {f}. "Next year again," said {name}.',
            "{N} learned that {virtue} is worth more than a prize.",
            "{N} gave the prize to {his} {family}, who put it on the shelf.",
        ],
    ],
    "storm": [
        [
            "{Moment}, the sky turned black, and the wind grew stronger and stronger.",
            'The old {job2} looked at the sky. "A storm is coming," he said.',
            "{Later}, thunder rolled over {spot}.",
            "Nobody had expected the storm. It came in the middle of {month}.",
            "First the birds became quiet. Then the first drops fell.",
        ],
        [
            "{N} closed every window and lit a candle.",
            "The rain beat against the door, and the lights went out.",
            "A tree fell across the road to {spot}, and nobody could get through.",
            "{N} thought of {f}, who was alone near {spot2}.",
            "The water rose higher and higher until it reached the first step.",
        ],
        [
            "{N} took a lamp and a rope and went out into the dark.",
            '"I have to go," {n} said. "{F} needs me."',
            "{N} could hardly see {his} own feet, but {he} followed the wall to {spot2}.",
            "Somewhere in the noise {n} heard a voice. It was {f}.",
            "{N} called out, and {f} answered from {spot2}.",
        ],
        [
            "{N} threw the rope, and {f} caught it. Step by step, they made it back.",
            "Together they reached the house and shut the door behind them.",
            "They waited under a roof of {material} until the worst was over.",
            "{N} held {fhis} hand, and they counted the seconds between lightning and thunder.",
            "Towards morning the wind became tired, and so did they.",
        ],
        [
            "In the morning the world was washed clean, and a rainbow stood above {spot}.",
            "The next day everybody helped to repair the roofs.",
            "{F} never forgot that night, and neither did {n}.",
            "They made {food} and slept until noon.",
            "When people speak of the storm today, they also speak of {obj}.",
        ],
    ],
    "mystery": [
        [
            "Every night there was a strange sound near {spot}.",
            "{Moment}, {n} saw a light at {spot}, where nobody lived.",
            "Somebody had painted {a:colour} star on the door of {spot}.",
            "For {timespan}, small things had been disappearing: a spoon, a button, {a:thing}.",
            "There was a door at {spot} that had never been open before. That day it was.",
        ],
        [
            '"It is a ghost," people said. {N} did not believe in ghosts.',
            "{N} wrote everything down in a notebook and thought about it for {timespan}.",
            "{N} asked the {job2}, but the {job2} only shook his head.",
            "{N} decided to find out, even though {he} was a little {mood}.",
            "{F} had seen it too, but {fhe} had not told anyone.",
        ],
        [
            "That night {n} and {f} hid behind {a:adj} {box} and waited.",
            "{N} followed the footprints to {spot2}. They were very small.",
            "{N} put flour on the floor, and in the morning there were tracks in it.",
            "With a lamp in {his} hand, {n} went down the dark steps.",
            "{N} held {his} breath. Something was moving.",
        ],
        [
            "It was only a {critter} that had made its home there.",
            'There sat {owner}, the old {job2}, playing the {instrument}. "I did not want to wake anyone," he said.',
            "It was the wind, blowing through a hole in {a:adj} bottle.",
            "Behind the wall was a small room, and in the room lay everything that had been lost.",
            "It was {a:job} who worked at night because the days were too loud.",
        ],
        [
            "{N} laughed out loud. There is a reason for everything, if one looks for it.",
            "{N} kept the secret, and so did {f}.",
            "After that, nobody was afraid of {spot} any more.",
            "Some secrets, {n} thought, are nicer than the stories about them.",
            "From then on, {n} left a little {country_food} there every evening.",
        ],
    ],
    "learn": [
        [
            "{N} wanted to learn how to play the {instrument}.",
            "{Moment}, {n} heard somebody play the {instrument} and could not forget the sound.",
            "More than anything, {n} wanted to become {a:job2}.",
            "{N} could not swim, and {he} was ashamed of it.",
            "There was one thing that {n} could not do: {he} could not say sorry.",
        ],
        [
            "At first it was hard. Everything went wrong, and {n} was {mood}.",
            '"You are too young," said some. "You are too old," said others.',
            "{N} asked {f}, {fdesc}, to be {his} teacher.",
            "The first try ended in tears, and the second one in laughter.",
            "{N} almost gave up after {timespan}.",
        ],
        [
            '"Everyone begins badly," said {f}. "The trick is to begin again."',
            "{F} showed {him} how to do it, {slowly} and many times.",
            "Each day {n} did a little more than the day before.",
            "{N} practised at {spot}, where nobody could see {him}.",
            "{F} never laughed at {him}, and that was the best help of all.",
        ],
        [
            "And then, {moment}, it worked. {N} could hardly believe it.",
            "{Later}, something had changed. It was not hard any more.",
            "In {month}, {n} showed everybody at {spot2} what {he} had learned.",
            'One day {f} said: "I have nothing left to teach you."',
            "{N} closed {his} eyes, took a breath and did it.",
        ],
        [
            "Today {n} teach{es} others, and {he} never laugh{s} at anyone.",
            "It had taken {timespan}, but it was worth every minute.",
            "{N} had learned more than that one thing: {he} had learned {virtue}.",
            '"It was easy," {n} said, and everyone laughed.',
            "{F} was the first to clap.",
        ],
    ],
    "gift": [
        [
            "It was the birthday of {f}, {fdesc}, and {n} had no present.",
            "{Moment}, {n} wanted to make something for {f}.",
            "{F} had been ill for {timespan}, and {n} wanted to make {fhim} happy.",
            "Soon it would be {season}, and {f} had nothing warm to wear.",
            "{N} had saved {number} coins to buy a present for {f}.",
        ],
        [
            "At {spot} there was {a:adj} {thing}, but it cost too much.",
            "{N} looked in every shop, but nothing was right.",
            "{N} could not buy anything, so {he} decided to make it {himself}.",
            "{N} began to build {a:thing} out of {material}. It looked more like a potato.",
            "{N} wanted to bake a cake, but there was no flour in the house.",
        ],
        [
            "The {job2} saw {him} and asked what was wrong. Then he gave {him} what {n} needed.",
            "{N} worked on it for {timespan}, and {he} told nobody.",
            "{N} gave away {his} own {thing} and got what {he} needed for it.",
            "At {spot2}, {n} found just the right piece of {material}.",
            "{N} asked everybody to help, and everybody did.",
        ],
        [
            "When {f} opened the {box}, {fhe} could not speak for a moment.",
            '{F} looked at the present for {timespan}. "Did you make this?" {fhe} asked.',
            "The present was a little crooked, but {f} loved it.",
            '"It is the most beautiful thing I have ever had," said {f}.',
            "{F} laughed and cried at the same time.",
        ],
        [
            "The best gifts, {n} thought, are made of time.",
            "They had {food}, and outside {sky2}.",
            "{F} kept it for the rest of {fhis} life.",
            "{N} went home {mood}, with nothing in {his} pockets.",
            "And on {his} own next birthday, {n} got a surprise too.",
        ],
    ],
    "quarrel": [
        [
            "{N} and {f} were friends, but one day they had a quarrel about {a:thing}.",
            "{Moment}, {f} said something that hurt {obj}.",
            "{N} and {f} had shared everything, until somebody gave them a single {thing}.",
            "{N} had promised to meet {f} at {spot}, and {he} had forgotten it.",
            "{F} wanted to go left, and {n} wanted to go right.",
        ],
        [
            "They did not speak to each other for {timespan}.",
            "{N} went home alone and shut the door.",
            "Everything was less fun without {f}, even {hobby}.",
            "{N} was angry at first. Then {he} was only sad.",
            "{N} sat at {spot} and threw small stones.",
        ],
        [
            'Then {his} {family} said: "Who is right is not as important as who is there."',
            "{N} began to write a letter. It took {timespan}, and it had only three words.",
            "{Later}, {n} saw {f} sitting alone at {spot2}.",
            "{N} thought of all the good days they had had.",
            "A {critter} walked from one to the other, as if it wanted to say something.",
        ],
        [
            '"I am sorry," said {name}. "I am sorry too," said {f}. "I was waiting for you."',
            "{N} went to {spot2} with {food} and two spoons.",
            "They both began to speak at the same time, and then they both laughed.",
            '{N} held out the {thing}. "You can have it," {he} said. "Let us share it," said {f}.',
            "{F} opened the door before {n} could knock.",
        ],
        [
            "Nobody could remember what the quarrel had been about.",
            "They are still friends today, and they still do not agree about everything.",
            "A good friend, {n} learned, is worth more than {a:thing}.",
            "And they walked home together, although it was raining.",
            "It takes {virtue} to say sorry, and a friend to hear it.",
        ],
    ],
    "cooking": [
        [
            "{N} wanted to cook {country_food} for everyone at {spot}.",
            "{Moment}, {n} was so hungry that {he} decided to make {country_food}.",
            "Guests were coming, and there was nothing to eat but one {vegetable}.",
            "{N} had found an old recipe for {country_food}. The last line was missing.",
            "The cook was ill, and {n} had to make lunch for {number} people.",
        ],
        [
            "{N} took a big pot, water, salt and {a:vegetable}.",
            "{N} cut the {vegetable}, washed the {vegetable2} and lit the fire.",
            "First {n} put in too much salt. Then {he} put in too much sugar.",
            "The recipe said: stir for {timespan}. {N} stirred until {his} arm hurt.",
            "It smelled strange, and it was {colour}.",
        ],
        [
            '"It needs something," said {f}, and {fhe} put in a handful of herbs.',
            "{F} brought {a:vegetable2}, the {job2} brought butter, and a neighbour brought bread.",
            "One after another, people came by and put something into the pot.",
            '{F} tried a spoon of it. "More pepper," {fhe} said, "and a little {virtue}."',
            "{N} asked {his} {family}, who knew the missing line: cook it with a friend.",
        ],
        [
            "At last the {country_food} was ready. Everybody became quiet and ate.",
            "The first guest tried it and smiled. Then he asked for more.",
            "It was the best {country_food} that anyone had ever had at {spot}.",
            "It was a little burnt, but nobody said so.",
            "In a few minutes the pot was empty.",
        ],
        [
            "Since then, they have cooked together every {day}.",
            "{N} wrote the recipe on the wall, so that nobody would forget it.",
            '"What was the secret?" they asked. "All of you," said {name}.',
            "{N} washed the dishes, and {f} dried them, and they sang.",
            "Good {country_food}, {n} always said, begins with good company.",
        ],
    ],
}
ENDINGS = [
    "And that is the end of the story.",
    "The end.",
    "And they lived happily ever after.",
    "And so it was, and so it is today.",
    "Since that day, {n} {has} never forgotten what {virtue} can do.",
    "That night, {sky2}, and {n} slept better than ever before.",
    "And if you go to {spot} today, you may still hear about it.",
    "{N} looked up at the sky and smiled.",
    "It was a small thing, but it changed everything.",
    "And sometimes, when the wind blows, {n} still think{s} of that day.",
    "Then {n} went home, for it was time for supper.",
    "Tomorrow would be another day.",
    "",
    "",
    "",
    "",
]
CHAPTER_LINKS = [
    "{Season2} came, and with it a new day {where}.",
    "Some weeks had passed, and life went on {where}.",
    "{N} thought that the adventures were over. {He} was wrong.",
    "The next {day} began quietly. {Sight}",
    "It was {month} when the next thing happened.",
    "{Name} and {f} had become even better friends by then.",
    "Not everything was solved yet.",
]
CRITTERS = [
    "kitten",
    "puppy",
    "little owl",
    "bird",
    "hedgehog",
    "fox cub",
    "squirrel",
    "goat",
    "seal",
    "rabbit",
    "mouse",
]


def often(rng: random.Random, names: list[str]) -> str:
    """One of the names, the first ones more often: with all alike, the likeliest name would be the oddest kind's."""
    return names[int(len(names) * rng.random() ** 1.6)]


def _person(rng: random.Random) -> tuple[str, str, str]:
    """A name, its subject pronoun, and a noun: a child, a grown-up at work ("{job}"), an animal or a robot."""
    roll = rng.random()
    if roll < 0.08:
        return rng.choice(ROBOT_NAMES), "it", "robot"
    if roll < 0.26:
        return rng.choice(ANIMAL_NAMES), rng.choice(("he", "she")), rng.choice(STORY_ANIMALS)
    girl = rng.random() < 0.5
    name, he = (often(rng, GIRLS), "she") if girl else (often(rng, BOYS), "he")
    if roll < 0.68:
        return name, he, "girl" if girl else "boy"
    return name, he, "{job}"


def _nameless(rng: random.Random) -> dict[str, str]:
    """A hero who is only "the fox" or "the girl" all through the story."""
    nouns = {"girl": "she", "boy": "he", "robot": "it", "king": "he", "queen": "she", "princess": "she", "wizard": "he"}
    noun = rng.choice([*STORY_ANIMALS, *nouns, "knight", "pilot", "baker", "sailor", "farmer", "teacher", "doctor"])
    return {"name": f"the {noun}", "he": nouns.get(noun) or rng.choice(("he", "she")), "noun": noun}


FORMS = {"he": ("him", "his", "himself"), "she": ("her", "her", "herself"), "it": ("it", "its", "itself")}
ADJECTIVES = [
    "little ",
    "young ",
    "old ",
    "small ",
    "{kind} ",
    "{kind} young ",
    "very {kind} ",
    "{kind} little ",
    "",
    "",
]


def _cast(writer: Writer, name: str, he: str, noun: str, prefix: str) -> None:
    """Binds a character's name, description and pronouns under `prefix` ("" for the hero, "f" for the friend)."""
    adjective = writer.rng.choice(ADJECTIVES)
    if noun in ("girl", "boy") and "old" in adjective:
        adjective = "little "
    if noun == "{job}" and "little" in adjective:
        adjective = "young "
    noun = writer.say(noun)
    him, his, himself = FORMS[he]
    first = writer.say(adjective) + noun
    forms = {"he": he, "him": him, "his": his, "himself": himself, "noun": noun}
    forms["desc"] = with_article(first)
    writer.bound |= {prefix + key: value for key, value in forms.items()}
    writer.bound[prefix + "name"] = name


def new_writer(
    rng: random.Random, self_told: bool, world: str | None = None, hero: Mapping[str, str] | None = None
) -> Writer:
    """A writer with a world, a hero ("I" if `self_told`; `hero` fixes name, he, noun), a friend and their things."""
    place = WORLDS[world or rng.choice(list(WORLDS))]
    words: dict[str, Words] = {**GENERAL, **place, **REMARKS}
    writer = Writer(rng, words)
    bound = writer.bound
    if self_told:
        bound |= {"n": "I", "he": "I", "him": "me", "his": "my", "himself": "myself", "obj": "me", "name": "I"}
        bound |= {"has": "have", "s": "", "es": ""}
        bound["alias"] = rng.choice(GIRLS + BOYS)
    else:
        name, he, noun = (hero["name"], hero["he"], hero["noun"]) if hero else _person(rng)
        _cast(writer, name, he, noun, "")
        bound |= {"n": [name, he], "obj": name, "has": "has", "s": "s", "es": "es"}
    name, he, noun = _person(rng)
    while name in (bound["name"], bound.get("alias")):
        name, he, noun = _person(rng)
    _cast(writer, name, he, noun, "f")
    bound["f"] = name
    spots = rng.sample(place["spot"], 2)
    jobs = rng.sample(place["job"], 2)
    seasons = rng.sample(GENERAL["season"], 2)
    bound |= {"spot": spots[0], "spot2": spots[1], "where": writer.say(rng.choice(place["where"])), "job2": jobs[1]}
    bound |= {key: rng.choice(place[key]) for key in ("thing", "machine")}
    bound |= {key: rng.choice(GENERAL[key]) for key in ("family", "vegetable", "country_food", "instrument", "hobby")}
    bound |= {"season": seasons[0], "season2": seasons[1], "vegetable2": rng.choice(GENERAL["vegetable"])}
    bound |= {"critter": rng.choice(CRITTERS), "petname": rng.choice(ANIMAL_NAMES), "sky2": GENERAL["sky"]}
    bound["owner"] = rng.choice([one for one in GIRLS + BOYS if one not in (bound["name"], name)])
    bound["sight2"] = [sight[0].lower() + sight[1:] for sight in place["sight"]]
    bound["job"] = jobs[0]
    return writer


def _introduce(text: str, name: str, description: str) -> str:
    """Describes the friend where the name first appears, and nowhere else."""
    told = f"{name}, {description}"
    text = text.replace(f"{told}, who", f"{name}, who").replace(f"{told}, ", f"{name} ").replace(told, name)
    at = text.find(name) + len(name)
    if at < len(name) or text[at] == "'":
        return text
    comma = "" if text[at] in ".,;:!?" else ","
    return f"{text[:at]}, {description}{comma}{text[at:]}"


def _opening(writer: Writer, self_told: bool, arc: str) -> list[str]:
    if self_told:
        return [writer.pick(SELF_OPENINGS)]
    if str(writer.bound["name"]).startswith("the "):
        return [writer.pick(NAMELESS_OPENINGS)]
    if arc == "repair" and writer.chance(0.75):
        return [writer.pick(MACHINE_OPENINGS), writer.pick(MACHINE_HEROES)]
    return [writer.pick(OPENINGS)]


def _tell(writer: Writer, arc: str, begin: int = 0) -> list[str]:
    sentences: list[str] = []
    for number, stage in enumerate(ARCS[arc]):
        if number < begin:
            continue
        sentences.append(writer.pick(stage))
        if number == 1 and writer.chance(0.4):
            sentences.append(writer.pick(stage))
        if number < 4 and writer.chance(0.4):
            sentences.append(writer.pick(SCENERY))
        if number < 4 and writer.chance(0.35):
            sentences.append(writer.pick(TALK))
    return sentences


def _paragraphs(rng: random.Random, sentences: list[str]) -> str:
    """Joins sentences; about half of the stories are broken into paragraphs of a few sentences."""
    if rng.random() < 0.5:
        return " ".join(sentences)
    parts: list[str] = []
    while sentences:
        size = rng.randint(2, 5)
        parts.append(" ".join(sentences[:size]))
        sentences = sentences[size:]
    return "\n\n".join(parts)


def story(rng: random.Random, writer: Writer | None = None, arc: str | None = None, short: bool = False) -> str:
    """One short story; `writer` brings a cast and `arc` a plot where the caller has chosen them."""
    self_told = rng.random() < 0.2 if writer is None else writer.bound["n"] == "I"
    if writer is None:
        writer = new_writer(rng, self_told, hero=_nameless(rng) if not self_told and rng.random() < 0.15 else None)
    arc = arc or rng.choice(list(ARCS) if rng.random() < 0.85 else ["repair"])
    sentences = _opening(writer, self_told, arc)
    if len(sentences) == 2:
        details, begin = 0, 1  # the machine has already broken: the story goes on with the repair
    else:
        details, begin = rng.choice((0, 1)) if short else rng.choice((0, 1, 2, 2, 3)), 0
    sentences += [writer.pick(DETAILS) for _ in range(details)]
    sentences += _tell(writer, arc, begin)
    ending = writer.pick(ENDINGS)
    text = _paragraphs(rng, [*sentences, ending] if ending else sentences)
    return _introduce(text, str(writer.bound["f"]), str(writer.bound["fdesc"]))


def long_story(rng: random.Random) -> str:
    """Several chapters about the same people in the same place: the text that reaches late positions."""
    writer = new_writer(rng, self_told=rng.random() < 0.2)
    title = writer.say("{name} and the {adj} {thing}" if writer.bound["n"] != "I" else "My {adj} {thing}")
    arcs = rng.sample(list(ARCS), rng.randint(3, 6))
    parts = [title.title()] if rng.random() < 0.7 else []
    for number, arc in enumerate(arcs, 1):
        parts.append(f"Chapter {number}")
        opening = [writer.pick(OPENINGS if writer.bound["n"] != "I" else SELF_OPENINGS)]
        if number > 1:
            opening = [writer.pick(CHAPTER_LINKS)]
        parts.append(_paragraphs(rng, [*opening, writer.pick(DETAILS), *_tell(writer, arc)]))
    parts.append(writer.pick(ENDINGS) or "The end.")
    return _introduce("\n\n".join(parts), str(writer.bound["f"]), str(writer.bound["fdesc"]))
